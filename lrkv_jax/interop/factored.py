"""LRKV with its small cache in transformers: `lrkv export --factored`.

`assets/modeling_lrkv.py.txt` is the class, in PyTorch; it is exported as
modeling_lrkv.py and has the parameters under their own names and in their own layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lrkv_jax.config import ModelConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.interop import shards
from lrkv_jax.interop.architectures import Architecture
from lrkv_jax.models.rope import frequencies, logit_factor

MODELING = Path(__file__).parent / "assets/modeling_lrkv.py.txt"
FACTORED = Architecture("LrkvForCausalLM", "lrkv", (), {}, {}, {}, {})
# Settings that the class reads under our names.
_SAME = ("qk_norm", "norm_gain", "embedding_norm", "gated", "tied_head")


def check_factored(model: ModelConfig) -> None:
    """Raise `LrkvError` for a model whose cache has no factors that the class knows."""
    if model.attention.kind != "lrkv" or not model.attention.rank:
        raise LrkvError(f"attention {model.attention.label} has no factors: leave out --factored")
    for name in ("qk_gain", "qkv_bias"):
        if getattr(model, name):
            raise LrkvError(
                f"model.{name} = true, which --factored does not know: leave --factored out"
            )


def settings_of(model: ModelConfig) -> dict[str, Any]:
    """What config.json says beside the numbers that every model has."""
    entry, base, scaling = model.attention, model.rope_base, model.rope_scaling
    rank_key, rank_value = entry.ranks
    return {
        **{name: getattr(model, name) for name in _SAME},
        "final_logit_softcapping": model.softcap,
        "hidden_act": model.activation,
        "rank_key": rank_key,
        "rank_value": rank_value,
        "rope_mode": entry.rope,
        "key_frequencies": list(frequencies(model.head_width, base, scaling)),
        "latent_frequencies": list(frequencies(rank_key, base, scaling)),
        "logit_scale": model.head_width**-0.5 * logit_factor(scaling),
        "tie_word_embeddings": False,
        "auto_map": {
            "AutoConfig": "modeling_lrkv.LrkvConfig",
            "AutoModelForCausalLM": "modeling_lrkv.LrkvForCausalLM",
        },
    }


def as_they_are(params: Any, layers: int) -> Iterator[shards.Tensor]:
    """Every parameter by its path; those of blocks, layer by layer."""
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not name.startswith("blocks."):
            yield shards.Tensor(name, leaf.shape, leaf.dtype, partial(np.asarray, leaf))
            continue
        for layer in range(layers):
            there = name.replace("blocks.", f"blocks.{layer}.", 1)
            yield shards.Tensor(there, leaf.shape[1:], leaf.dtype, partial(_layer_of, leaf, layer))


def _layer_of(leaf: jax.Array, layer: int) -> np.ndarray:
    return np.asarray(leaf[layer])
