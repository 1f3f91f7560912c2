"""What could be compiled in place of the grouped decode kernel, right and wrong.

Each has the arguments of a kernel's `mosaic` part, and runs where there is no GPU.
"""

import os
import signal

import jax
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


def never_ends(plan, q_BTHK, k_BSGK, v_BSGK, pages_BN, lengths_B, scale, interpret):
    """As on a GPU: the device is busy for ever, and no signal handler of Python's is reached."""
    wait = jax.lax.while_loop(lambda n: n >= 0, lambda n: (n + 1) % 1000, lengths_B.max())
    return xla(q_BTHK + wait, k_BSGK, v_BSGK, pages_BN, lengths_B, scale)


def ends_its_process(plan, q_BTHK, k_BSGK, v_BSGK, pages_BN, lengths_B, scale, interpret):
    os.kill(os.getpid(), signal.SIGSEGV)
