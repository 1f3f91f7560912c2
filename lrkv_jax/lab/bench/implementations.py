"""The ways to attend to a cache that a benchmark compares: this project's, and its peers.

Each is a function of a problem's arrays. One that cannot run where it is asked for says why, in
one line; nothing is left out silently. Peers of attention over whole keys and values join where a
variant's cache holds these.

B batch  T new tokens (1)  S cache slots  H heads  G key/value heads  K head width
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from lrkv_jax.kernels.int8 import Int8Rows
from lrkv_jax.lab.bench.problems import DecodeProblem, with_kernel
from lrkv_jax.models.attention.grouped import GroupedCache


@dataclass(frozen=True)
class Implementation:
    """`attend(problem, inputs, cache, lengths_B)` gives (outputs, log-sum-exp or None).

    `unsupported_reason(problem)` says why it cannot solve a problem, or gives None.
    """

    name: str
    attend: Callable[..., tuple[jax.Array, jax.Array | None]]
    says: str
    unsupported_reason: Callable[[DecodeProblem], str | None] = lambda problem: None


def _whole_keys(problem):
    cache = problem.cache
    whole = isinstance(cache, GroupedCache) and not isinstance(cache.k_BSGK, Int8Rows)
    return None if whole else "it needs whole keys and values of each head"


def _cudnn_reason(problem):
    backend = jax.default_backend()
    if backend != "gpu":
        return f"the backend is {backend}, not a GPU"
    if missing := _whole_keys(problem):
        return missing
    dtype = problem.cache.k_BSGK.dtype
    return None if dtype == jnp.bfloat16 else f"cuDNN's attention takes no {dtype}"


def _jax_nn(implementation, problem, inputs, cache, lengths_B):
    """`jax.nn.dot_product_attention`: JAX's own, by XLA or by cuDNN."""
    out_BTHK = jax.nn.dot_product_attention(
        inputs.query, cache.k_BSGK, cache.v_BSGK,
        scale=problem.abstract.scale, key_value_seq_lengths=lengths_B,
        implementation=implementation,
    )  # fmt: skip
    return out_BTHK, None


IMPLEMENTATIONS = {
    each.name: each
    for each in (
        Implementation("xla", partial(with_kernel, impl="xla"), "ours, compiled by XLA"),
        Implementation("mosaic", partial(with_kernel, impl="mosaic"), "ours, in Mosaic GPU"),
        Implementation(
            "jax", partial(_jax_nn, "xla"), "jax.nn.dot_product_attention by XLA", _whole_keys
        ),
        Implementation(
            "cudnn",
            partial(_jax_nn, "cudnn"),
            "jax.nn.dot_product_attention by cuDNN",
            _cudnn_reason,
        ),
    )
}
