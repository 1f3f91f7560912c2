"""Decoding from the cache: the engine (prefill, step, batching) and sampling."""

from lrkv_jax.decode.engine import Engine, generate
from lrkv_jax.decode.sampling import Sampling

__all__ = ["Engine", "Sampling", "generate"]
