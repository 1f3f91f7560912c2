"""The Hugging Face architectures: their settings and tensors next to ours, in one table.

Export and import both read it. A `WeightMapping` maps a tensor to a parameter, and to the layout of
its numbers there; the mappings of a block are listed once, for all layers.

D model width  H heads  G key/value heads  K head width  F hidden width of the MLP
L layers  C latent width  R_k, R_v ranks of keys and values
Q a head's expanded width, of keys and values
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from lrkv_jax.config import ModelConfig
from lrkv_jax.config.rope import OWN
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.layers import rms_norm
from lrkv_jax.models.rope import logit_factor

LAYER = "model.layers.{}."


@dataclass(frozen=True)
class WeightLayout:
    """A parameter's layout in a file: inputs and outputs flattened, and the matrix transposed.

    `inputs` counts the parameter's leading axes that are inputs; 0 is no matrix, and
    lies as it is, flattened unless it is a `table`. `swapped` exchanges the two halves
    of the last axis: a rotation by the opposite angle. Ours is `factor` times theirs.
    """

    inputs: int = 0
    swapped: bool = False
    table: bool = False
    factor: float = 1.0

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the file of a parameter of this shape."""
        if self.table:
            return shape
        outputs = math.prod(shape[self.inputs :])
        return (outputs, math.prod(shape[: self.inputs])) if self.inputs else (outputs,)

    def out(self, ours: np.ndarray) -> np.ndarray:
        """Our array as the file has it."""
        if self.swapped:
            ours = np.roll(ours, ours.shape[-1] // 2, axis=-1)
        if self.factor != 1:
            ours = _divided(ours, self.factor)
        there = self.shape(ours.shape)
        return ours.reshape(there[::-1]).T if self.inputs else ours.reshape(there)

    def into(self, theirs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The file's array as ours of this shape."""
        ours = (theirs.T if self.inputs else theirs).reshape(shape)
        if self.factor != 1:
            theirs = np.asarray(ours, np.float32)
            ours = (np.float64(self.factor) * theirs).astype(np.float32)
            # Rounded twice, a number may miss itself: its neighbor then goes back to what it was.
            for to in (-np.inf, np.inf):
                near = np.nextafter(ours, np.float32(to))
                better = (_divided(ours, self.factor) != theirs) & (
                    _divided(near, self.factor) == theirs
                )
                ours = np.where(better, near, ours)
        return np.roll(ours, ours.shape[-1] // 2, axis=-1) if self.swapped else ours


def _divided(ours: np.ndarray, factor: float) -> np.ndarray:
    return (ours / np.float64(factor)).astype(np.float32)


AS_IS, TABLE, MATRIX = WeightLayout(), WeightLayout(table=True), WeightLayout(inputs=1)
SWAPPED, JOINED = WeightLayout(inputs=1, swapped=True), WeightLayout(inputs=2)


@dataclass(frozen=True)
class WeightMapping:
    """A tensor's name, the path of the parameter that it is, and its layout.

    One of a parameter that a model does not have is left out, but a gain is written as ones.
    """

    theirs: str
    ours: str
    layout: WeightLayout

    @property
    def stacked(self) -> bool:
        return self.theirs.startswith(LAYER)


def _block(theirs: str, ours: str, layout: WeightLayout) -> WeightMapping:
    return WeightMapping(f"{LAYER}{theirs}.weight", f"blocks.{ours}", layout)


_ENDS = (
    WeightMapping("model.embed_tokens.weight", "embedding.table", TABLE),
    WeightMapping("lm_head.weight", "head.kernel", MATRIX),
)
_VALUES = (
    _block("self_attn.v_proj", "attention.value", MATRIX),
    _block("self_attn.o_proj", "attention.output", JOINED),
)
_ATTENTION = (
    _block("self_attn.q_proj", "attention.query", MATRIX),
    _block("self_attn.k_proj", "attention.key", MATRIX),
    *_VALUES,
)
# Its rotate_half is (x2, −x1), a rotation by −θ: with the halves of queries and keys
# exchanged it is ours, and their norm is what it was.
_ATTENTION_TURNED = (
    _block("self_attn.q_proj", "attention.query", SWAPPED),
    _block("self_attn.k_proj", "attention.key", SWAPPED),
    *_VALUES,
)
_GAINS = (
    _block("input_layernorm", "norm_attention.gain", AS_IS),
    _block("post_attention_layernorm", "norm_mlp.gain", AS_IS),
    WeightMapping("model.norm.weight", "norm.gain", AS_IS),
)
_QK_GAINS = (
    _block("self_attn.q_norm", "attention.query_gain", AS_IS),
    _block("self_attn.k_norm", "attention.key_gain", AS_IS),
)
_PLAIN_MLP = (
    _block("mlp.up_proj", "mlp.up", MATRIX),
    _block("mlp.down_proj", "mlp.down", MATRIX),
)

_BIASES = tuple(
    WeightMapping(f"{LAYER}self_attn.{theirs}_proj.bias", f"blocks.attention.{ours}", AS_IS)
    for theirs, ours in (("q", "query_bias"), ("k", "key_bias"), ("o", "output_bias"))
)
# Weights sum to 1, so that biases of values are one of the output: ours has that alone,
# and they are written as zeros.
VALUE_BIAS, OUTPUT_BIAS = (f"{LAYER}self_attn.{name}_proj.bias" for name in "vo")

# The same number in both.
_NUMBERS = {
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "head_dim": "head_width",
    "intermediate_size": "feed_forward",
    "vocab_size": "vocabulary",
    "rms_norm_eps": "norm_eps",
}
ACTIVATIONS = {"relu2": "relu2", "silu": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}


@dataclass(frozen=True)
class Architecture:
    """One class of transformers.

    `settings` are those of our model that every such model has; `numbers` those that
    both write, under its name and ours; `fixed` the values that its configuration
    must have, and `defaults` the values of fields that it omits.
    """

    name: str
    model_type: str
    mappings: tuple[WeightMapping, ...]
    settings: dict[str, Any]
    numbers: dict[str, str]
    fixed: dict[str, Any]
    defaults: dict[str, Any]

    def mappings_of(self, model: ModelConfig) -> list[WeightMapping]:
        """A model's mappings.

        A tied head, which is scaled by 1/sqrt(D) here and not there, is undone by the last gain.
        """
        mappings = [*self.mappings, *(_BIASES if model.qkv_bias else ())]
        if not model.tied_head:
            return mappings
        scaled = WeightLayout(factor=math.sqrt(model.width))
        return [replace(one, layout=scaled) if one.ours == "norm.gain" else one for one in mappings]


_LLAMA_LIKE = {"norm_gain": True, "embedding_norm": False, "softcap": None}
_LLAMA_NUMBERS = {"tie_word_embeddings": "tied_head"}
_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
_BIASED = {"attention_bias": "qkv_bias"}  # queries', keys', values' and the output's
_GATED_MLP = (*_PLAIN_MLP, _block("mlp.gate_proj", "mlp.gate", MATRIX))
# Of the classes that have windows; in others' files the field is left over.
_WINDOW = {"sliding_window": 4096}
_WINDOW_FROM_A_LAYER = {**_WINDOW, "use_sliding_window": False, "max_window_layers": 28}


def _llama(
    name: str, model_type: str, *more: WeightMapping, fixed: Any = None, defaults: Any = None,
    **settings: Any,
):  # fmt: skip
    """Llama, and what differs from it in a few settings, tensors and defaults."""
    biased = "qkv_bias" not in settings  # by its config.json
    return Architecture(
        name, model_type,
        (*_ENDS, *_GAINS, *_ATTENTION, *more, *(_GATED_MLP if settings["gated"] else _PLAIN_MLP)),
        {**_LLAMA_LIKE, **settings}, {**_LLAMA_NUMBERS, **(_BIASED if biased else {})}, fixed or {},
        {**_LLAMA_DEFAULTS, **({"attention_bias": False} if biased else {}), **(defaults or {})},
    )  # fmt: skip


ARCHITECTURES = (
    Architecture(
        "NanoChatForCausalLM", "nanochat",
        (*_ENDS, *_ATTENTION_TURNED, _block("mlp.fc1", "mlp.up", MATRIX),
         _block("mlp.fc2", "mlp.down", MATRIX)),
        {"qk_norm": True, "norm_gain": False, "embedding_norm": True, "tied_head": False,
         "gated": False, "qk_gain": False, "qkv_bias": False},
        {"final_logit_softcapping": "softcap"},
        {"attention_bias": False, "tie_word_embeddings": False},
        {"rms_norm_eps": 1e-6, "final_logit_softcapping": 15.0, "hidden_act": "relu2"},
    ),
    _llama("LlamaForCausalLM", "llama", fixed={"mlp_bias": False}, gated=True, qk_norm=False),
    _llama("MistralForCausalLM", "mistral", defaults=_WINDOW, gated=True, qk_norm=False,
           qkv_bias=False),
    _llama("Qwen2ForCausalLM", "qwen2", defaults=_WINDOW_FROM_A_LAYER, gated=True, qk_norm=False,
           qkv_bias=True),
    _llama("Qwen3ForCausalLM", "qwen3", *_QK_GAINS, defaults=_WINDOW_FROM_A_LAYER, gated=True,
           qk_norm=True, qk_gain=True),
    _llama("ArceeForCausalLM", "arcee", fixed={"mlp_bias": False},
           defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5}, gated=False, qk_norm=False),
)  # fmt: skip


# Of LRKV with the joint norm, from what `deepseek_params` makes. All layers are dense.
DEEPSEEK = Architecture(
    "DeepseekV3ForCausalLM", "deepseek_v3",
    (*_ENDS, *_GAINS, *_GATED_MLP,
     _block("self_attn.q_proj", "attention.query", MATRIX),
     _block("self_attn.kv_a_proj_with_mqa", "attention.down", MATRIX),
     _block("self_attn.kv_a_layernorm", "attention.gain", AS_IS),
     _block("self_attn.kv_b_proj", "attention.up", MATRIX),
     _block("self_attn.o_proj", "attention.output", JOINED)),
    {"gated": True, "activation": "silu", "softcap": None, "norm_eps": 1e-6},
    {"first_k_dense_replace": "layers", "moe_intermediate_size": "feed_forward",
     "qk_rope_head_dim": "head_width"},
    # Servers read the settings of experts, though no layer has any.
    {"q_lora_rank": None, "rope_interleave": True, "n_routed_experts": 2, "num_experts_per_tok": 1,
     "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "moe_layer_freq": 1,
     "num_nextn_predict_layers": 0},
    {},
)  # fmt: skip


def _deepseek_settings(model: ModelConfig) -> dict[str, Any]:
    """What a config.json of DeepSeek's has in addition, or otherwise."""
    scaling = model.rope_scaling
    if scaling is not None:  # with both, DeepSeek's factor is of whole logits, as ours is
        both = {"attention_factor": None, "mscale": 1.0, "mscale_all_dim": 1.0}
        scaling = scaling.model_copy(update=both)
    return {
        "kv_lora_rank": model.attention.cache_values(model) - model.head_width,
        "qk_nope_head_dim": _of_deepseek(model.attention.ranks[0]),
        "v_head_dim": _of_deepseek(model.head_width),
        "num_key_value_heads": model.heads,
        "rope_parameters": _rope_parameters(model.model_copy(update={"rope_scaling": scaling})),
    }


def _of_deepseek(width: int) -> int:
    """A head's width without rope, and of values, with zeros up to DeepSeek's own.

    GPU servers have kernels for 128 + 64 and 128 alone. The cache is the same.
    """
    return -(-width // 128) * 128


def deepseek_params(model: ModelConfig, params: Any) -> Any:
    """Parameters as `DEEPSEEK` has them: a normed embedding, a head, and absorbed attention.

    The latent is [keys' latents | values' latents | shared value], C wide. A query without rope is
    q B_h, in the coordinates of its head's latent, so W^UK is zeros and ones.
    """
    w, table = params["blocks"]["attention"], params["embedding"]["table"]
    (L, G, D, R_k), (_, _, R_v, K), H = w["key_down"].shape, w["value_up"].shape, model.heads
    nope, wide = _of_deepseek(R_k), _of_deepseek(K)
    # Theirs is 1/sqrt(nope + K), times the square of YaRN's factor.
    scale = ((nope + K) / K) ** 0.5 * logit_factor(model.rope_scaling)
    if model.rope_scaling is not None:
        scale /= (0.1 * math.log(model.rope_scaling.factor) + 1) ** 2
    group_H = np.arange(H) // (H // G)
    up_LHRK, of_group_HG = w["key_up"][:, group_H], np.eye(G)[group_H]
    nope_LDHR = jnp.einsum("LDHK,LHRK->LDHR", w["query"], up_LHRK, precision="highest")
    nope_LDHR = jnp.pad(nope_LDHR, [(0, 0)] * 3 + [(0, nope - R_k)])
    down = [w[name].swapaxes(1, 2).reshape(L, D, -1) for name in ("key_down", "value_down")]
    keys_CHR = np.einsum("HG,RQ->GRHQ", of_group_HG, np.eye(R_k)).reshape(-1, H, R_k)
    values_LCHK = jnp.einsum("HG,LGRK->LGRHK", of_group_HG, w["value_up"]).reshape(L, -1, H, K)
    up_LCHQ = jnp.zeros((L, G * (R_k + R_v) + K, H, nope + wide))
    up_LCHQ = up_LCHQ.at[:, : G * R_k, :, :R_k].set(keys_CHR)
    up_LCHQ = up_LCHQ.at[:, G * R_k : -K, :, nope : nope + K].set(values_LCHK)
    attention = {
        "query": scale * jnp.concatenate([nope_LDHR, _interleaved(w["query"])], axis=-1),
        "down": jnp.concatenate([*down, w["value"], _interleaved(w["key"])], axis=-1),
        "gain": jnp.ones(up_LCHQ.shape[:2]),
        "up": up_LCHQ.at[:, -K:, :, nope : nope + K].set(np.eye(K)[:, None]),
        "output": jnp.pad(w["output"], [(0, 0), (0, 0), (0, wide - K), (0, 0)]),
    }
    return params | {
        "blocks": params["blocks"] | {"attention": attention},
        "embedding": {"table": rms_norm(table, model.norm_eps) if model.embedding_norm else table},
        # The last gain has a tied head's factor.
        "head": params.get("head", {"kernel": table.T}),
    }


def _interleaved(x: jnp.ndarray) -> jnp.ndarray:
    """The last axis with the two coordinates of each rotated pair next to one another."""
    return jnp.stack(jnp.split(x, 2, axis=-1), axis=-1).reshape(x.shape)


# Llama and Arcee check it when they load. Mistral and Qwen2 do not, but are written as a Llama.
_WHOLE_HEADS = ("llama", "mistral", "qwen2", "arcee")
# Gains that a model has not are written as ones.
_ONES = ("norm_gain", "qk_gain")


def of_model(model: ModelConfig, *, deepseek: bool = False) -> Architecture:
    """The architecture whose block is this model's, or DeepSeek's if the block is.

    Raises `LrkvError` where there is none, naming what each lacks.
    """
    if not deepseek:
        _check_attention(model)
    entry, scaling, against = model.attention, model.rope_scaling, []
    for one in (DEEPSEEK,) if deepseek else ARCHITECTURES:
        wrong = [
            f"model.{key}={json.dumps(theirs)}"
            for key, theirs in one.settings.items()
            if getattr(model, key) != theirs and not (key in _ONES and theirs)
        ]
        if one.model_type in _WHOLE_HEADS and model.width % model.heads:
            wrong.append(f"model.width in multiples of model.heads = {model.heads}")
        if scaling and scaling.kind == "yarn" and one.model_type == "nanochat":
            wrong.append("no yarn")  # a norm after the rotation undoes its factor
        if deepseek and scaling and (scaling.kind != "yarn" or scaling.truncate is False):
            wrong.append("a truncated yarn, or no model.rope_scaling")
        if deepseek and getattr(entry, "latent_norm", None) != "joint":
            wrong.append("attention=lrkv attention.rope=shared attention.latent_norm=joint")
        if not wrong:
            return one
        against.append(f"{one.name} needs {' and '.join(wrong)}")
    raise LrkvError(f"no architecture of transformers has this block: {'; '.join(against)}")


def _check_attention(model: ModelConfig) -> None:
    """Raise `LrkvError` unless keys and values are x W, rotated in K dimensions."""
    entry = model.attention
    if entry.kind not in ("mha", "gqa", "mqa", "mla", "lrkv"):
        raise LrkvError(f"attention {entry.kind}: no class of transformers is known to have it")
    same = entry.kind == "lrkv" and not entry.rank and entry.mode != "none"  # MQA in every mode
    if entry.mode not in (None, "full") and not same:
        factored = entry.kind == "lrkv" and entry.mode != "none"
        fix = "use --as factored" if factored else "train it in rope: full"
        if getattr(entry, "latent_norm", None) == "joint":
            fix = "use --as deepseek"
        raise LrkvError(
            f"attention.rope = {entry.rope}, and only a whole key that is rotated (full) is a key "
            f"of transformers': {fix}"
        )
    if entry.kind == "mla" and entry.latent_norm:
        raise LrkvError(
            "attention.latent_norm = true, and no class of transformers norms a latent and rotates "
            "whole keys: use --as factored"
        )


def config_of(one: Architecture, model: ModelConfig, context: int, dtype: str) -> dict[str, Any]:
    """The config.json of this model."""
    settings = model.model_dump() | {"feed_forward": model.feed_forward_width}
    numbers = {theirs: settings[ours] for theirs, ours in {**_NUMBERS, **one.numbers}.items()}
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return {
        "architectures": [one.name],
        "model_type": one.model_type,
        **numbers,
        "num_key_value_heads": model.attention.key_heads(model),
        "hidden_act": names[model.activation],
        "max_position_embeddings": context,
        "rope_theta": model.rope_base,
        "rope_parameters": _rope_parameters(model),
        **one.fixed,
        "dtype": dtype,
        "use_cache": True,
        **(_deepseek_settings(model) if one is DEEPSEEK else {}),
    }


def architecture_of(config: dict[str, Any]) -> Architecture:
    """The architecture that a config.json names; raises `LrkvError` for one that is unknown."""
    known = {one.name: one for one in ARCHITECTURES}
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    if not isinstance(name, str) or name not in known:
        shown = _short(name or named or config.get("model_type") or "nothing")
        raise LrkvError(f"architectures = {shown} is unknown here: use {', '.join(known)}")
    return known[name]


def of_config(config: dict[str, Any], context: int) -> tuple[Architecture, dict[str, Any], Any]:
    """The architecture of a config.json, our model's settings, and its attention variant.

    Raises `LrkvError`, with the fix, for what cannot be such a model.
    """
    one = architecture_of(config)
    for key, must in one.fixed.items():
        if (found := config.get(key, must)) != must:
            raise LrkvError(
                f"{key} = {_short(found)}, and only {must} is taken of {one.name}: take another"
            )
    config = {**one.defaults, **config}
    activation = config["hidden_act"]
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise LrkvError(f"hidden_act = {_short(activation)}: use {', '.join(ACTIVATIONS)}")
    heads, width = (whole_number(config, key) for key in ("num_attention_heads", "hidden_size"))
    for key, usual in (("head_dim", width // heads), ("num_key_value_heads", heads)):
        if config.get(key) is None:
            config[key] = usual
    for key in _NUMBERS:
        if key != "rms_norm_eps":
            whole_number(config, key)
    groups = whole_number(config, "num_key_value_heads")
    settings = {ours: config[theirs] for theirs, ours in {**_NUMBERS, **one.numbers}.items()}
    entry = {"kind": "gqa", "kv_heads": groups}
    if groups in (heads, 1):
        entry = {"kind": "mha" if groups == heads else "mqa"}
    base, scaling = _rope(config, one)
    settings |= one.settings | {
        "rope_base": base,
        "rope_scaling": scaling,
        "window": _window(config, context, one) if "sliding_window" in one.defaults else None,
        "activation": ACTIVATIONS[activation],
    }
    return one, settings, entry


def _window(config: dict[str, Any], context: int, one: Architecture) -> int | None:
    """The window of all layers, None for none that is shorter than the context.

    Raises `LrkvError` for one of some layers.
    """
    by_layer = "max_window_layers" in one.defaults  # Mistral reads no field that names layers
    if config["sliding_window"] is None or (by_layer and not config["use_sliding_window"]):
        return None
    window = whole_number(config, "sliding_window")
    if window >= context:
        return None
    if not by_layer:
        return window
    kinds, first = config.get("layer_types"), config["max_window_layers"]
    slides = {True, False}
    if isinstance(kinds, list):
        slides = {kind == "sliding_attention" for kind in kinds}
    elif isinstance(first, int):
        slides = {layer >= first for layer in range(config["num_hidden_layers"])}
    if len(slides) == 1:
        return window if True in slides else None
    raise LrkvError(
        f"sliding_window = {window} of some layers is shorter than the context of {context}: "
        f"set train.seq_len={window} or less"
    )


def whole_number(config: dict[str, Any], key: str) -> int:
    """A number of config.json that counts something; raises `LrkvError` for another value."""
    if key not in config:
        raise LrkvError(f"config.json has no {key}: fetch it again")
    found = config[key]
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= 2**40:
        shown = _short(found)
        raise LrkvError(f"config.json: {key} = {shown} is no number of 1 to 2^40: fetch it again")
    return found


def _short(value: Any) -> str:
    """A value of a file that may hold anything, short enough for a line."""
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _rope_parameters(model: ModelConfig) -> dict[str, Any]:
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": model.rope_base}
    settings = scaling.model_dump(exclude_none=True)
    if scaling.kind == "llama3":  # transformers has no defaults for these
        settings = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **settings}
    renamed = {theirs: settings.pop(ours) for ours, theirs in _ROPE.items() if ours in settings}
    return {**renamed, "rope_theta": model.rope_base, **settings}


def _rope(config: dict[str, Any], one: Architecture) -> tuple[float, dict[str, Any] | None]:
    """The rotation's base and scaling; transformers 4 has them at the top and in `rope_scaling`.

    Where both groups are there, transformers reads `rope_scaling`.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    group = config.get(name) or {}
    if not isinstance(group, dict):
        raise LrkvError(f"{name} = {_short(group)} is no group of settings: fetch it again")
    settings = {"rope_theta": config.get("rope_theta", 10_000.0), **group}
    kind = settings.get("rope_type") or settings.get("type") or "default"
    part = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if part != 1.0:
        raise LrkvError(
            f"partial_rotary_factor = {_short(part)}, and only whole heads are rotated here: take "
            "another model"
        )
    base = settings["rope_theta"]
    if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base < math.inf:
        raise LrkvError(f"rope_theta = {_short(base)} is no base of rotation: fetch it again")
    if kind == "default":
        return float(base), None
    known = [name for name in OWN if name != "yarn" or one.model_type != "nanochat"]
    if kind not in known:
        shown = _short(kind)
        raise LrkvError(f"rope scaling {shown} is not taken of {one.name}: use {', '.join(known)}")
    ours = {"kind": kind, "factor": settings.get("factor")}
    for name in OWN[kind]:
        if (value := settings.get(_ROPE.get(name, name))) is not None:
            ours[name] = value
    if "original_context" in OWN[kind]:  # transformers takes the one outside the group first
        inside = ours.get("original_context", config.get("max_position_embeddings"))
        ours["original_context"] = config.get(_ROPE["original_context"], inside)
    return float(base), ours


# Ours and theirs, where the names differ.
_ROPE = {"kind": "rope_type", "original_context": "original_max_position_embeddings"}
