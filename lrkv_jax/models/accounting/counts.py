"""The costs of a model, from its configuration alone: parameters, training FLOPs, cache bytes.

Nothing here loads JAX. A variant answers for one of its layers (`lrkv_jax.config.attention`);
here are the sums over a model and a run.

L layers  D model width  H heads  K head width  F feed-forward width  V vocabulary
T context  N parameters
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.models.attention import MHA

CACHE_DTYPE, CACHE_ITEMSIZE = "bfloat16", 2
SCALAR_ITEMSIZE = 4  # the cache's inverse norms are float32 whatever its dtype


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model by part, summed over its layers.

    `kv` is a share of `attention`, its gains and biases left out.
    """

    embedding: int
    head: int  # 0 where the head is the embedding's transpose
    attention: int
    kv: int
    mlp: int
    norm: int

    @property
    def total(self) -> int:
        return self.embedding + self.head + self.attention + self.mlp + self.norm


def over_layers(model: ModelConfig, of_kind: Callable[[ModelConfig], float]) -> Any:
    """The sum over all layers of what `of_kind` gives for one layer of its kind."""
    return model.cycles * sum(map(of_kind, model.cycle))


def parameter_counts(model: ModelConfig) -> ParameterCounts:
    """Exactly the parameters that `Transformer(model)` has.

    Embedding and head V·D each; a layer has queries, keys and values as its variant counts them,
    the output projection H·K·D and an MLP of 2·D·F, gated 3·D·F; gains, if any, are 2·L + 1 vectors
    of D, and those of QK-norm two of K for a layer; biases, if any, are as long as a layer's
    queries, its keys and its output.
    """
    layers = model.layers
    return ParameterCounts(
        embedding=model.vocabulary * model.width,
        head=0 if model.tied_head else model.vocabulary * model.width,
        attention=over_layers(model, _attention_parameters),
        kv=over_layers(model, lambda kind: kind.attention.kv_parameters(kind)),
        mlp=layers * (3 if model.gated else 2) * model.width * model.feed_forward_width,
        norm=(2 * layers + 1) * model.width if model.norm_gain else 0,
    )


def _attention_parameters(kind: ModelConfig) -> int:
    attention, width = kind.attention, kind.attention.query_width(kind)
    count = attention.kv_parameters(kind)
    count += kind.width * kind.heads * (width + kind.head_width)  # queries, and the output
    if kind.qk_gain:
        count += 2 * width
    if kind.qkv_bias:
        count += (kind.heads + attention.key_heads(kind)) * width + kind.width
    return count


def multiplied_parameters(model: ModelConfig) -> int:
    """Parameters that multiply one token's activations in a forward pass, each as often as it does.

    The lookup of the embedding multiplies nothing; a tied table works as the head and counts.
    """
    counts = parameter_counts(model)
    lookup = 0 if model.tied_head else counts.embedding
    more = over_layers(model, lambda kind: kind.attention.extra_multiplications(kind))
    return counts.total - lookup + more


def training_flops_per_token(model: ModelConfig, context: int) -> int:
    """FLOPs of one token's forward and backward pass, at sequences of `context` tokens.

    6·N + 6·L·H·T·(logit width + value width), N as `multiplied_parameters` counts it: PaLM's count
    (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B), 6·N + 12·L·H·K·T where
    queries and values are K wide. Attention counts all T² pairs, not the causal half, as published
    MFUs do; of a layer with a window, T times the window.
    """

    def pairs(kind: ModelConfig) -> int:
        each = kind.attention.logit_width(kind) + kind.head_width
        return kind.heads * min(context, kind.window or context) * each

    return 6 * multiplied_parameters(model) + 6 * over_layers(model, pairs)


def training_tokens(config: RunConfig) -> int:
    """The run's budget: `train.tokens`, or steps · batch · context."""
    train = config.train
    return train.tokens or train.total_steps * train.global_batch_size * train.seq_len


def training_exaflops(config: RunConfig) -> float:
    """10¹⁸ FLOPs of the whole run's training, without validation."""
    per_token = training_flops_per_token(config.model, config.train.seq_len)
    return per_token * training_tokens(config) / 1e18


def cache_values_per_token(model: ModelConfig) -> int:
    """Values a token leaves in the caches of all layers, in the cache's dtype.

    Inverse norms are float32 scalars, not values: `cache_bytes_per_token` has them.
    """
    return over_layers(model, lambda kind: kind.attention.cache_values(kind))


def cache_bytes_per_token(model: ModelConfig, itemsize: int = CACHE_ITEMSIZE) -> int:
    """Bytes of everything a token leaves in the caches of all layers.

    `itemsize` is the size of a value, and of a scale in an int8 cache; 2, the default, is
    bfloat16's. Padding is not counted: `cache_allocated_bytes_per_token` has it.
    """
    return over_layers(model, lambda kind: _layer_bytes(kind, itemsize))


def _layer_bytes(kind: ModelConfig, itemsize: int) -> int:
    scalars = kind.attention.cache_scalars(kind) * SCALAR_ITEMSIZE
    unquantized = kind.attention.cache_values(kind) * itemsize + scalars
    if kind.kv_cache_dtype == "auto":
        return unquantized
    rows = kind.attention.int8_rows(kind)
    return unquantized - sum(n * (width * (itemsize - 1) - itemsize) for n, width in rows)


def cache_allocated_bytes_per_token(model: ModelConfig, itemsize: int = CACHE_ITEMSIZE) -> int:
    """Bytes of a token's slot in the caches of all layers as they are allocated, padding included.

    tests/models/attention/test_contract.py holds it against live caches.
    """
    return cache_allocated_bytes(model, 1, itemsize)


def cache_allocated_bytes(model: ModelConfig, length: int, itemsize: int = CACHE_ITEMSIZE) -> int:
    """Allocated bytes of a sequence of `length` tokens, of which windows see their last ones.

    An engine's windows keep more: `serving` has what it reserves.
    """

    def of_kind(kind: ModelConfig) -> int:
        return layer_allocated_bytes(kind, itemsize) * min(length, kind.window or length)

    return over_layers(model, of_kind)


def layer_allocated_bytes(kind: ModelConfig, itemsize: int = CACHE_ITEMSIZE) -> int:
    """Bytes of a token's slot in the cache of one layer of this kind, padding included."""
    each = 1 if kind.kv_cache_dtype == "int8" else itemsize  # what is padded are rows
    return _layer_bytes(kind, itemsize) + kind.attention.cache_padding_values(kind) * each


def cache_fraction(model: ModelConfig) -> float:
    """Cached values as a share of the same model's with MHA."""
    return cache_values_per_token(model) / cache_values_per_token(with_mha(model))


def cache_bytes_fraction(model: ModelConfig, itemsize: int = CACHE_ITEMSIZE) -> float:
    """Cached bytes, inverse norms included, as a share of the same model's with MHA."""
    mha_bytes = cache_bytes_per_token(with_mha(model), itemsize)
    return cache_bytes_per_token(model, itemsize) / mha_bytes


def cache_fraction_published(model: ModelConfig) -> float:
    """The share of MHA's cache as the paper counts it: MLA without its rope key, no norms."""
    values = over_layers(model, lambda kind: kind.attention.cache_values_published(kind))
    return values / (model.layers * MHA().cache_values_published(model))


def with_mha(model: ModelConfig) -> ModelConfig:
    """The model with MHA and a cache in its dtype, with which caches are compared."""
    plain = {"attention": MHA(), "window_attention": None, "kv_cache_dtype": "auto"}
    return model.model_copy(update=plain)


def plan(config: RunConfig, names: list[str]) -> dict[str, Any]:
    """The costs of a run under each of the variants `names`, ready for JSON.

    Sums over all layers; bytes are of a bfloat16 cache; fractions are of the same model with MHA,
    listed or not. Raises `LrkvError` for a variant that cannot have the model's shape.
    """
    model = config.model
    return {
        "name": config.name,
        "layers": model.layers,
        "layers_pattern": model.layers_pattern,
        "window": model.window,
        "width": model.width,
        "heads": model.heads,
        "head_width": model.head_width,
        "vocabulary": model.vocabulary,
        "context": config.train.seq_len,
        "tokens": training_tokens(config),
        "cache_dtype": CACHE_DTYPE + " (rows in int8)" * (model.kv_cache_dtype == "int8"),
        "variants": {name: _variant_plan(config.variant(name)) for name in names},
    }


def _variant_plan(config: RunConfig) -> dict[str, int | float]:
    model, counts = config.model, parameter_counts(config.model)
    return {
        "parameters": counts.total,
        "attention_parameters": counts.attention,
        "kv_parameters": counts.kv,
        "flops_per_token": training_flops_per_token(model, config.train.seq_len),
        "training_exaflops": training_exaflops(config),
        "kv_cache_values_per_token": cache_values_per_token(model),
        "kv_cache_bytes_per_token": cache_bytes_per_token(model),
        "kv_cache_allocated_bytes_per_token": cache_allocated_bytes_per_token(model),
        "kv_cache_fraction_of_mha": cache_fraction(model),
        "kv_cache_bytes_fraction_of_mha": cache_bytes_fraction(model),
        "kv_cache_fraction_published": cache_fraction_published(model),
    }
