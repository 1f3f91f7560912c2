"""Choose the plan of a call: the one that fits its shapes, or the fastest that was timed here."""

from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels.split_kv import plan as plans
from lrkv_jax.kernels.split_kv import tuned
from lrkv_jax.kernels.split_kv.schedule import BITS


def find(dtype, widths, impl, *, T, slots, paged, H, G, bits="fast", **shape):
    """(plan, None), or (None, why the kernel cannot take these arrays).

    `slots` is the length of the cache arrays' second axis, which with page tables is a page's.
    """
    if bits not in BITS:
        raise LrkvError(f"decode bits {bits!r} are unknown: use {' or '.join(BITS)}")
    interpret = impl == "interpret"
    reason = plans.objection(
        dtype, T=T, slots=slots, paged=paged, widths=widths, interpret=interpret
    )
    if reason:
        return None, reason
    # The interpreter runs one CTA after the other, idle ones too.
    multiprocessors = 4 if interpret else plans.MULTIPROCESSORS
    plan = plans.make_plan(H=H, G=G, T=T, multiprocessors=multiprocessors, bits=bits, **shape)
    if plan is None:
        return None, "no split of the heads fits a multiprocessor"
    return tuned.best(plan), None
