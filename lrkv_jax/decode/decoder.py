"""A model's weights where they lie, the programs that run on them, and one cache to lend."""

from typing import Any

import jax
from jax.sharding import Mesh

from lrkv_jax.config import ModelConfig
from lrkv_jax.decode import placement
from lrkv_jax.errors import LrkvError
from lrkv_jax.model import with_parameters

# Tokens of a prompt that are prefilled at once: memory is linear in it.
PREFILL_CHUNK = 512
# Steps of one call: the host waits for none of them but the last.
STEPS_PER_CALL = 16


class Decoder:
    """A model for batches of `batch` sequences of up to `length` tokens, on a mesh or one device.

    Raises `LrkvError` for parameters of another model and a mesh that cannot split it.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        *,
        batch: int,
        length: int,
        mesh: Mesh | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        steps_per_call: int = STEPS_PER_CALL,
    ):
        sizes = {
            "batch": batch, "length": length,
            "prefill_chunk": prefill_chunk, "steps_per_call": steps_per_call,
        }  # fmt: skip
        for name, size in sizes.items():
            if size < 1:
                raise LrkvError(f"{name} = {size}: use 1 or more")
        placement.check_parameters(config, params)
        self.config, self.batch, self.length = config, batch, length
        self.prefill_chunk, self.steps_per_call = prefill_chunk, steps_per_call
        self.mesh = placement.mesh_for(config, mesh)
        with jax.set_mesh(self.mesh):
            params = placement.in_compute_dtype(config, params)
            model = with_parameters(config, params).unstacked()
            self.model = placement.placed(model, self.mesh)
        self._spare_cache = None  # the last call's buffers, used again

    def run(self, program: Any, *arguments: Any, **static: Any) -> Any:
        """One of `lrkv_jax.decode.programs` on this model, where it lies."""
        with jax.set_mesh(self.mesh):
            return program(self.model, *arguments, **static)

    def take_cache(self) -> Any:
        """A cache for the whole batch, a list with one entry a layer: the last call's, if whole."""
        cache, self._spare_cache = self._spare_cache, None
        if cache is None or any(leaf.is_deleted() for leaf in jax.tree.leaves(cache)):
            cache = placement.new_cache(self.model, self.batch, self.length, self.mesh)
        return cache

    def give_back(self, cache: Any) -> None:
        """Keep a cache for the next call."""
        self._spare_cache = cache
