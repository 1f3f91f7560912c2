"""The products of lrkv_jax's step and nothing else: what XLA leaves to gain by all other means.

A peer of `peers.py`: takes the same orders as torch_train.py. Products come one after the other,
each with all cores.
"""

import time

import jax
import jax.numpy as jnp
from answering import answer
from ours_train import Trainer

from lrkv_jax.distributed import start


def products(jaxpr, times=1):
    """The equation of each product of a traced program, as often as it runs."""
    seen = set()  # XLA makes one of products that are the same
    for equation in jaxpr.eqns:
        if equation.primitive is jax.lax.dot_general_p:
            one = (*map(id, equation.invars), str(equation.params))
            yield from [equation] * times * (one not in seen)
            seen.add(one)
        runs = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        parameters = list(equation.params.values())
        for inner in jax.tree.leaves(parameters, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products(inner, runs)


class Products:
    """The products of a traced program; `apart` gives each its own operands, as layers have."""

    def __init__(self, jaxpr, *, apart=False):
        self.equations = list(products(jaxpr))
        self.names = [
            [f"{i if apart else ''} {v.aval.str_short()}" for v in equation.invars]
            for i, equation in enumerate(self.equations)
        ]
        self.operands = {
            name: jnp.full(v.aval.shape, 0.01, v.aval.dtype)
            for equation, names in zip(self.equations, self.names, strict=True)
            for v, name in zip(equation.invars, names, strict=True)
        }
        self.run = jax.jit(self.chain)

    def __call__(self, times):
        return self.run(self.operands, times)

    def chain(self, operands, times):
        """Every product so many times; each waits for the one before it, and each is read."""

        def once(_, last):
            done = [last]
            for equation, names in zip(self.equations, self.names, strict=True):
                pair = [operands[name] for name in names]
                pair, done[-1] = jax.lax.optimization_barrier((pair, done[-1]))
                done.append(jax.lax.dot_general_p.bind(*pair, **equation.params))
            return sum(array.ravel()[0] for array in jax.lax.optimization_barrier(done))

        return jax.lax.fori_loop(0, times, once, jnp.float32(0))


class TrainingProducts(Trainer):
    def __init__(self, **order):
        super().__init__(**order)
        with jax.set_mesh(self.mesh):
            step = jax.make_jaxpr(self.step)(self.state, next(self.batches))
        self.products = Products(step.jaxpr)

    def steps(self, steps):
        began = time.perf_counter()
        jax.block_until_ready(self.products(steps))
        return {"seconds": time.perf_counter() - began, "loss": [], "grad_norm": 0.0}


if __name__ == "__main__":
    start()
    answer(lambda **order: (f"jax {jax.__version__}", TrainingProducts(**order).steps))
