"""Decoding from the cache: the engine (requests, pages, a scheduler, meshes) and sampling."""

from lrkv_jax.decode.engine import Engine, EngineReport, generate
from lrkv_jax.decode.request import Draw, Request
from lrkv_jax.decode.sampling import Sampling
