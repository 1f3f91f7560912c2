"""lrkv_jax's step, a peer of `peers.py`: takes the same orders as torch_train.py."""

import itertools
import time
from dataclasses import replace

import jax
import numpy as np
from answering import answer

from lrkv_jax.config import load_config
from lrkv_jax.distributed import start
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.distributed.rules import batch_sharding
from lrkv_jax.training.state import init_state
from lrkv_jax.training.step import make_train_step


class Trainer:
    def __init__(self, config, changes, parameters, tokens, **_):
        config = load_config(config, changes)
        self.mesh = make_mesh(config.mesh)
        with jax.set_mesh(self.mesh):
            self.step = make_train_step(
                config, self.mesh, np.ones(config.model.vocabulary, np.int32)
            )
            state = init_state(config, self.mesh)
        arrays = np.load(parameters)

        def of(path, leaf):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return jax.device_put(arrays[name], leaf.sharding)

        self.state = replace(state, params=jax.tree.map_with_path(of, state.params))
        self.batches = itertools.cycle(np.load(tokens))

    def steps(self, steps):
        """`steps` steps; the clock runs from the first batch in NumPy to the last update."""
        rows, losses = batch_sharding(self.mesh), []
        with jax.set_mesh(self.mesh):
            start = time.perf_counter()
            for _ in range(steps):
                tokens_BU = jax.device_put(next(self.batches), rows)
                self.state, metrics = self.step(self.state, tokens_BU)
                losses.append(metrics["loss"])
            jax.block_until_ready((self.state, losses))
            seconds = time.perf_counter() - start
        norm = float(metrics["grad_norm"])
        return {"seconds": seconds, "loss": list(map(float, losses)), "grad_norm": norm}


if __name__ == "__main__":
    start()
    answer(lambda **order: (f"jax {jax.__version__}", Trainer(**order).steps))
