"""The attention variants at a size that takes milliseconds, with no weight left at zero.

Output projections and the head start at zero, and LRKV's residual at a tenth of its shared part:
a comparison at initialization would pass on a broken model.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax.config import ModelConfig
from lrkv_jax.config.attention import variants
from lrkv_jax.config.rope import RopeScaling
from lrkv_jax.models.attention import GQA, LRKV, MHA, MLA, MQA
from lrkv_jax.models.transformer import Unstacked, abstract_parameters, specs, with_parameters

HEADS, HEAD_WIDTH, WIDTH, VOCABULARY = 4, 8, 24, 40
MODES = ("full", "shared", "latent", "none")
# Rank 0 is MQA in every mode; an even rank is rotated whole in `latent` alone.
RANKS = {
    "full": {"rank_0": 0, "odd_rank": 3, "rank_K": HEAD_WIDTH},
    "shared": {"odd_rank": 3},
    "latent": {"odd_rank": 3, "even_rank": 4, "rank_K": HEAD_WIDTH},
    "none": {"odd_rank": 3},
}
FIVE = {
    "mha": MHA(),
    "gqa": GQA(kv_heads=2),
    "mqa": MQA(),
    "mla": MLA(kv_lora_rank=12, qk_rope_head_dim=4),
    "lrkv": LRKV(rank=3, rope="full"),
}
LRKVS = {
    f"lrkv-{mode}-{name}": LRKV(rank=rank, rope=mode)
    for mode, ranks in RANKS.items()
    for name, rank in ranks.items()
}
# Residuals that serve groups of heads, their keys and values of two ranks.
LRKVS |= {
    f"lrkv-{mode}-groups": LRKV(rank=3, rank_value=5, kv_heads=2, rope=mode) for mode in MODES
}
# DeepSeek's attention.
JOINT = {"rope": "shared", "latent_norm": "joint"}
LRKVS |= {
    "lrkv-joint": LRKV(rank=3, **JOINT),
    "lrkv-joint-groups": LRKV(rank=3, rank_value=5, kv_heads=2, **JOINT),
}
ALL = {
    **{name: entry for name, entry in FIVE.items() if name != "lrkv"},
    "gqa-none": GQA(kv_heads=2, rope="none"),
    "mla-no_rope": MLA(kv_lora_rank=12, qk_rope_head_dim=0),
    "mla-full": MLA(kv_lora_rank=11, rope="full"),
    "mla-rank": MLA(kv_lora_rank=8, qk_rope_head_dim=4, rank=3),
    "mla-full-rank": MLA(kv_lora_rank=8, rope="full", rank=3, kv_heads=2, latent_norm=False),
    **LRKVS,
}
# A line that is registered and not above joins by itself, in each mode, its sizes all 2.
ALL |= {
    "-".join(filter(None, (entry.name, mode))): entry(
        **{name: 2 for name, field in entry.model_fields.items() if field.is_required()},
        **({"rope": mode} if mode else {}),
    )
    for entry in variants().values()
    for mode in entry.modes() or (None,)
    if not any(isinstance(known, entry) for known in ALL.values())
}


# Windows, and layers that see everything and rotate nothing.
HYBRID = {"layers": 4, "layers_pattern": "SG", "window": 5, "window_attention": GQA(kv_heads=2)}


# What pretrained models have and the paper's does not.
PRETRAINED = {
    "rope_base": 300.0,
    "rope_scaling": RopeScaling(kind="yarn", factor=4, original_context=48, beta_fast=4),
    "gated": True,
    "norm_gain": True,
    "qk_gain": True,
    "qkv_bias": True,
    "norm_eps": 0.1,
}


def small(attention, **changes) -> ModelConfig:
    """A float32 model of two layers."""
    shape = {
        "layers": 2, "width": WIDTH, "heads": HEADS, "head_width": HEAD_WIDTH,
        "feed_forward": 32, "vocabulary": VOCABULARY, "dtype": "float32",
    }  # fmt: skip
    return ModelConfig(**{**shape, "attention": attention, **changes})


@functools.cache
def random_params(config: ModelConfig, seed: int = 0):
    """Parameters N(0, 1/fan_in), none zero, of the tree that the model has."""
    return jax.tree.map(jnp.asarray, _drawn(config, seed))


def _drawn(config, seed):
    rng = np.random.default_rng(seed)
    shapes = abstract_parameters(config)

    def fill(spec, leaf):
        if spec.group == "vector":
            return np.float32(1 + 0.3 * rng.standard_normal(leaf.shape))
        std = 1.0 if spec.group == "embedding" else spec.fans(leaf.shape)[0] ** -0.5
        return np.float32(std * rng.standard_normal(leaf.shape))

    return jax.tree.map(fill, specs(config), shapes)


def random_model(config: ModelConfig, seed: int = 0):
    """The model around `random_params`, its blocks a list."""
    # Unstacked in numpy: a slice of a JAX array is a program to compile, for every shape.
    return jax.tree.map(jnp.asarray, Unstacked(with_parameters(config, _drawn(config, seed))))


def random_tokens(*shape: int, seed: int = 0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape, dtype=np.int32)


def error(value, truth) -> float:
    """Largest difference over the largest magnitude of the truth."""
    value, truth = np.asarray(value, np.float64), np.asarray(truth, np.float64)
    assert value.shape == truth.shape
    return float(np.abs(value - truth).max() / np.abs(truth).max())
