"""Decoding from the cache: the engine (prefill, steps, batching, meshes) and sampling."""

from lrkv_jax.decode.engine import Engine, EngineReport, generate
from lrkv_jax.decode.sampling import Sampling
