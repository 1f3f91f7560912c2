"""What could be compiled in place of the grouped decode kernel, right and wrong.

Each has the arguments of a kernel's `mosaic` part, and runs where there is no GPU.
"""

import jax.numpy as jnp

from lrkv_jax.kernels import grouped_decode

xla = grouped_decode._xla


def right(plan, q_BTHK, k_BSGK, v_BSGK, pages_BN, lengths_B, scale, interpret):
    return xla(q_BTHK, k_BSGK, v_BSGK, pages_BN, lengths_B, scale)


def off_by_one_percent(plan, q_BTHK, k_BSGK, v_BSGK, pages_BN, lengths_B, scale, interpret):
    out_BTHK, lse_BTH = xla(q_BTHK, k_BSGK, v_BSGK, pages_BN, lengths_B, scale)
    return out_BTHK * 1.01, lse_BTH


def reads_a_slot_past_the_length(
    plan, q_BTHK, k_BSGK, v_BSGK, pages_BN, lengths_B, scale, interpret
):
    return xla(q_BTHK, k_BSGK, v_BSGK, pages_BN, lengths_B + 1, scale)


def forgets_the_last_partial_tile(
    plan, q_BTHK, k_BSGK, v_BSGK, pages_BN, lengths_B, scale, interpret
):
    lengths_B = jnp.where(lengths_B > 64, lengths_B // 64 * 64, lengths_B)
    return xla(q_BTHK, k_BSGK, v_BSGK, pages_BN, lengths_B, scale)


def raises(plan, q_BTHK, k_BSGK, v_BSGK, pages_BN, lengths_B, scale, interpret):
    raise NotImplementedError("no such\ninstruction")
