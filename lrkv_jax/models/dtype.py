"""Which number format a computation runs in."""

import jax
import jax.numpy as jnp


def resolve_dtype(name: str) -> jnp.dtype:
    """`float32` or `bfloat16` as named; `auto` is bfloat16 on an accelerator, float32 on a CPU.

    A CPU emulates bfloat16: slower, and less exact, than what it replaces.
    """
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)
