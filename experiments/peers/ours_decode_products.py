"""The products of lrkv_jax's decoder and nothing else, a peer of `peers.py` as ours_decode.py is.

Programs are the engine's: a chunk of prompts, and a token for each request. Each product has
its own weight, so that a step reads the whole model.
"""

import time

import jax
import numpy as np
from answering import answer
from ours_decode import engine_of
from ours_products import Products

from lrkv_jax.distributed import start


def make(**order):
    engine = engine_of(**order)
    calls = engine.calls
    each = calls.chunk_arrays(calls.prefill, {})[3][0].shape[1]

    def traced(rows, positions, states):
        """The products of reading, and of the logits of as many states."""

        def program(model, pool, tokens_FT, start_F, pages_FN):
            x_FTD, pool = model.decode(tokens_FT, pool, start_F, pages_FN)
            return model.logits(x_FTD.reshape(-1, 1, x_FTD.shape[-1])[:states]), pool

        tokens_FT, start_F = np.zeros((rows, positions), np.int32), np.zeros(rows, np.int32)
        tables = tuple(np.zeros((rows, each), np.int32) for _ in engine.config.windows)
        arrays = tokens_FT, start_F, tables
        with jax.set_mesh(engine.mesh):
            traced = jax.make_jaxpr(program)(calls.model, calls.cache(), *arrays)
        return Products(traced.jaxpr, apart=True)

    reads, steps = traced(*calls.prefill, 1), traced(engine.batch, 1, engine.batch)
    chunk = calls.prefill.rows * calls.prefill.positions

    def generate(prompts, new):
        began = time.perf_counter()
        jax.block_until_ready([reads(-(-sum(map(len, prompts)) // chunk)), steps(new - 1)])
        return {"seconds": time.perf_counter() - began, "tokens": []}

    return f"jax {jax.__version__}", generate


if __name__ == "__main__":
    start()
    answer(make)
