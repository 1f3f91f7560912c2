"""`lrkv_jax.kernels` as a library: JAX alone, with every shape in its signature."""

import inspect
import subprocess
import sys
from types import UnionType
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import AbstractArray, jaxtyped
from support.decode_cases import grouped_case, latent_case, lrkv_case, private_case

from lrkv_jax import kernels


def test_kernels_load_nothing_but_jax():
    code = """
import sys, lrkv_jax.kernels
ours = {name.split(".")[1] for name in sys.modules if name.startswith("lrkv_jax.")}
assert ours == {"errors", "kernels"}, ours
assert not {"flax", "optax", "orbax", "pydantic", "jax.experimental.pallas"} & {*sys.modules}
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_kernel_is_documented_and_annotated():
    for one in (getattr(kernels, name) for name in kernels.__all__):
        assert len(one.__doc__) > 60
        if inspect.isfunction(one):
            hints = get_type_hints(one)
            assert hints.keys() == {*inspect.signature(one).parameters, "return"}
            assert Any not in hints.values()


def check(value, hint):
    """That a value and what it is made of have the dtypes and shapes of its annotation."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        for field, inner in get_type_hints(type(value)).items():
            check(getattr(value, field), inner)
    elif isinstance(value, tuple):
        for part, inner in zip(value, get_args(hint), strict=True):
            check(part, inner)
    elif any(isinstance(kind, type) and issubclass(kind, AbstractArray) for kind in kinds):
        assert isinstance(value, hint), f"{jax.typeof(value)} is not {hint}"


def called(function, *arrays, **options):
    """Trace a call with its arguments and results checked against the annotations."""

    def call(*arrays):
        names, hints = inspect.signature(function).parameters, get_type_hints(function)
        with jaxtyped("context"):
            for name, array in zip(names, arrays, strict=False):
                check(array, hints[name])
            result = function(*arrays, **options)
            check(result, hints["return"])
        return result

    return jax.eval_shape(call, *jax.tree.map(jnp.asarray, arrays))


def test_annotations_are_what_is_taken_and_given():
    cases = [
        grouped_case([5, 0], T=3, G=1, K=16),
        *(latent_case([9, 4], mode, T=2, K=16, C=24, P=8) for mode in ("full", "decoupled")),
        *(private_case([9, 4], mode, T=2) for mode in ("full", "decoupled")),
        *(lrkv_case([9, 4], mode, T=2, G=2, K=16) for mode in ("full", "shared")),
        lrkv_case([9, 4], R=0, K=16),
    ]
    for case in cases:
        called(getattr(kernels, f"{case.kind}_decode"), *case.arrays, case.lengths_B, scale=1.0)
    q, kv = jnp.ones((2, 5, 4, 3)), jnp.ones((2, 5, 2, 3), jnp.bfloat16)
    assert called(kernels.causal_attention, q, kv, kv, scale=1.0).dtype == kv.dtype
    x, kernel, targets = jnp.ones((2, 5, 3)), jnp.ones((3, 7)), jnp.ones((2, 5), int)
    how = {"softcap": 15.0, "chunk": 4}
    called(kernels.mean_cross_entropy, x, kernel, targets, targets > 0, jnp.array(4), **how)
    with pytest.raises(AssertionError, match="is not .*B T G W"):
        called(kernels.causal_attention, q, kv[:, :3], kv, scale=1.0)
