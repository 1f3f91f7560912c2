"""The products of lrkv_jax's step and nothing else: what XLA leaves to gain by all other means.

A peer of `peers.py`: takes the same orders as torch_train.py. Products come one after the other,
each with all cores, on random operands.
"""

import time

import jax
from answering import answer
from ours_train import Trainer

from lrkv_jax.distributed import start


def products(jaxpr, times=1):
    """The equation of each product of a traced program, as often as it runs."""
    for equation in jaxpr.eqns:
        if equation.primitive is jax.lax.dot_general_p:
            yield from [equation] * times
        runs = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        parameters = list(equation.params.values())
        for inner in jax.tree.leaves(parameters, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products(inner, runs)


class Products(Trainer):
    def __init__(self, **order):
        super().__init__(**order)
        with jax.set_mesh(self.mesh):
            step = jax.make_jaxpr(self.step)(self.state, next(self.batches))
        self.equations = list(products(step.jaxpr))
        shapes = {v.aval.str_short(): v.aval for e in self.equations for v in e.invars}
        key = jax.random.key(0)
        self.operands = {
            name: jax.random.normal(key, aval.shape, aval.dtype) for name, aval in shapes.items()
        }
        self.run = jax.jit(self.chain)

    def chain(self, operands):
        """Every product, as XLA drops what nobody reads; each waits for the one before it."""
        done = [0.0]
        for equation in self.equations:
            pair = [operands[v.aval.str_short()] for v in equation.invars]
            pair, done[-1] = jax.lax.optimization_barrier((pair, done[-1]))
            done.append(jax.lax.dot_general_p.bind(*pair, **equation.params))
        return done

    def steps(self, steps):
        began = time.perf_counter()
        for _ in range(steps):
            done = self.run(self.operands)
        jax.block_until_ready(done)
        return {"seconds": time.perf_counter() - began, "loss": [], "grad_norm": 0.0}


if __name__ == "__main__":
    start()
    answer(lambda **order: (f"jax {jax.__version__}", Products(**order).steps))
