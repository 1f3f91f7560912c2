"""What a model and a run cost, from configuration alone; nothing here loads JAX."""

from lrkv_jax.accounting.counts import (
    CACHE_DTYPE,
    CACHE_ITEMSIZE,
    SCALAR_ITEMSIZE,
    ParameterCounts,
    cache_allocated_bytes_per_token,
    cache_bytes_fraction,
    cache_bytes_per_token,
    cache_fraction,
    cache_fraction_published,
    cache_values_per_token,
    parameter_counts,
    plan,
    training_exaflops,
    training_flops_per_token,
    training_tokens,
    with_mha,
)

__all__ = [
    "CACHE_DTYPE",
    "CACHE_ITEMSIZE",
    "SCALAR_ITEMSIZE",
    "ParameterCounts",
    "cache_allocated_bytes_per_token",
    "cache_bytes_fraction",
    "cache_bytes_per_token",
    "cache_fraction",
    "cache_fraction_published",
    "cache_values_per_token",
    "parameter_counts",
    "plan",
    "training_exaflops",
    "training_flops_per_token",
    "training_tokens",
    "with_mha",
]
