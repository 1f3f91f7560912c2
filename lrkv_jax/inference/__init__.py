"""Decoding from the cache: the engine (requests, pages, a scheduler, meshes) and sampling."""

from lrkv_jax.inference.engine import Engine, EngineReport
from lrkv_jax.inference.request import Request, Result, RngStream, Sequence
from lrkv_jax.inference.sampling import Sampling
