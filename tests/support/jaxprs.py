"""Every operation of a traced program, those of its inner programs too."""

import math

import jax


def equations(jaxpr):
    """The equations of a jaxpr and of the jaxprs in their parameters."""
    for equation in jaxpr.eqns:
        yield equation
        parameters = list(equation.params.values())
        for inner in jax.tree.leaves(parameters, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def sizes(jaxpr):
    """The elements of every intermediate array."""
    for equation in equations(jaxpr):
        yield from (math.prod(out.aval.shape) for out in equation.outvars)
