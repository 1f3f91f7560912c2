"""lrkv_jax's engine, a peer of `peers.py`: takes the same orders as transformers_decode.py."""

import tempfile
import time

import jax
from answering import answer

from lrkv_jax.distributed import start
from lrkv_jax.inference import Engine
from lrkv_jax.interop.importing import import_model
from lrkv_jax.training.restore import load_run


def engine_of(folder, requests, length, run=None, **_):
    with tempfile.TemporaryDirectory() as made:
        if run is None:
            import_model(folder, f"{made}/run")
        return Engine(load_run(run or f"{made}/run"), batch=requests, length=length)


def make(**order):
    engine = engine_of(**order)
    engine.warm()

    def generate(prompts, new):
        start = time.perf_counter()
        tokens = engine.generate(prompts, new)
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    return f"jax {jax.__version__}", generate


if __name__ == "__main__":
    start()
    answer(make)
