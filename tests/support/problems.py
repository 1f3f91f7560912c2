"""Decode problems of every variant at a size that takes milliseconds, made once for all tests."""

import functools

import jax.numpy as jnp
import numpy as np
from support.variants import ALL, small

from lrkv_jax.bench import gate
from lrkv_jax.bench.problems import make_problem
from lrkv_jax.config import LRKV
from lrkv_jax.kernels import latent_decode, lrkv_decode, reference

# Of LRKV the odd rank, which is padded, in each mode.
ENTRIES = {
    name.removesuffix("-odd_rank").replace("full-rank_0", "rank_0"): entry
    for name, entry in ALL.items()
    if not isinstance(entry, LRKV) or name.endswith("-odd_rank") or name == "lrkv-full-rank_0"
}


def model_of(name, **changes):
    return small(ENTRIES[name], **changes)


@functools.cache
def problem_of(name, lengths=(5, 9), slots=9, dtype="float32", **changes):
    """Made once for all tests: nothing in a problem changes."""
    return make_problem(model_of(name, **changes), np.array(lengths, np.int32), slots, dtype, 0)


@functools.cache
def truth_of(name):
    return gate.truth_of(problem_of(name))


def from_oracle(problem, given, cache, lengths_B):
    """Heads' outputs and log-sum-exp by the float32 oracle of the line's kernel."""
    layer, rest = problem.layer(given.weights), {"scale": problem.abstract.scale}
    if hasattr(cache, "k_BSGK"):
        return reference.grouped_decode(given.query, cache.k_BSGK, cache.v_BSGK, lengths_B, **rest)
    if hasattr(cache, "latent_BSC"):
        query, q_BTHP, rotation = given.query, None, None
        if layer.rope == "decoupled":
            query, q_BTHP = query
            query = jnp.einsum("BTHK,CHK->BTHC", query, layer.up_key[...])
        else:
            query = layer.expanded(query, lengths_B[:, None] - 1)
            up_key = layer.up_key[...] if layer.rope == "full" else None
            rotation = latent_decode.Rotation(given.angles, up_key, cache.inverse_norm_BHS)
        mean_BTHC, lse = reference.latent_decode(
            query, q_BTHP, cache.latent_BSC, cache.rope_key_BSP, rotation, lengths_B, **rest
        )  # fmt: skip
        return jnp.einsum("BTHC,CHK->BTHK", mean_BTHC, layer.up_value[...]), lse
    residual = None
    if cache.rk_BSGR is not None:
        residual = lrkv_decode.Residual(cache.rk_BSGR, cache.rv_BSGR, layer.value_up[...])
        if given.angles is not None:
            residual = residual._replace(up_key_HRK=layer.key_up[...], angles_SK=given.angles)
        else:
            q_BTHR = jnp.einsum("BTHK,HRK->BTHR", given.query[1], layer.key_up[...])
            if layer.rope == "latent":
                q_BTHR = layer.rotated(q_BTHR, lengths_B[:, None] - 1)
            residual = residual._replace(q_latent_BTHR=q_BTHR)
    return reference.lrkv_decode(
        given.query[0], cache.k_shared_BSK, cache.v_shared_BSK, residual,
        cache.inverse_norm_BGS, lengths_B, **rest,
    )  # fmt: skip
