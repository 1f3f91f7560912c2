"""Choose the implementation of a decode kernel, and log the choice once.

`auto` takes the Mosaic kernel on a Hopper GPU if the kernel supports the shape and dtype, and the
XLA path everywhere else. `xla`, `mosaic` and `interpret` (the Mosaic kernel in Pallas's
interpreter, on a CPU, for tests) force one, and raise where it cannot run.
"""

import functools
import logging

import jax

from lrkv_jax.errors import LrkvError

IMPLEMENTATIONS = ("auto", "xla", "mosaic", "interpret")
_log = logging.getLogger("lrkv_jax.kernels")
_choices: dict[str, str] = {}


def choose(kernel, impl, objection):
    """The implementation to run: "xla", "mosaic" or "interpret".

    `objection` is the reason why the Mosaic kernel cannot take the arguments, or None. Raises
    `LrkvError` for an unknown name, and for a forced kernel that cannot run.
    """
    if impl not in IMPLEMENTATIONS:
        raise LrkvError(f"decode kernel {impl!r} is unknown: use {', '.join(IMPLEMENTATIONS)}")
    if impl == "xla":
        return settle(kernel, impl, "asked for")
    missing = None if impl == "interpret" else _missing_gpu()
    if impl in ("mosaic", "interpret"):
        if objection or missing:
            raise LrkvError(f"{kernel} cannot run as {impl}: {missing or objection}; use xla")
        return settle(kernel, impl, "asked for")
    chosen = "xla" if missing or objection else "mosaic"
    reason = missing or objection or "a Hopper GPU is available"
    return settle(kernel, chosen, reason, best="mosaic")


def choices():
    """The last choice for each kernel in this process: {kernel: "xla: reason"}."""
    return dict(_choices)


def settle(kernel, chosen, reason, *, best=None):
    """Remember a choice, and log it once unless it was asked for; returns it.

    On a GPU, a choice other than `best` is logged as a warning.
    """
    _choices[kernel] = f"{chosen}: {reason}"
    if best:
        _say(kernel, chosen, reason, best)
    return chosen


@functools.cache
def _missing_gpu():
    """The reason why this process has no Hopper GPU, or None if it has one."""
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}, not a GPU"
    capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    if not capability.startswith("9."):
        return f"the GPU's compute capability is {capability}, and the kernel is written for 9.0"
    return None


@functools.cache  # logs each message once
def _say(kernel, chosen, reason, best):
    worse_on_gpu = jax.default_backend() == "gpu" and chosen != best
    level = logging.WARNING if worse_on_gpu else logging.INFO
    _log.log(level, "%s runs on %s: %s", kernel, chosen, reason)
