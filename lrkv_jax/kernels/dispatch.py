"""Choose the implementation of a decode kernel, and log the choice once.

`auto` takes the Mosaic kernel on a Hopper GPU if the kernel supports the shape and dtype and passes
its check on this device (`lrkv_jax.kernels.gpu.kernel_check`), and the XLA path everywhere else.
`xla`, `mosaic` and `interpret` force one, and raise where it cannot run. `interpret` is the Mosaic
kernel in Pallas's interpreter, on a CPU, for tests, and is not checked. It needs 8 threads of XLA's
(`XLA_FLAGS=--xla_force_host_platform_device_count=8`), and waits forever with fewer.
"""

import functools
import logging

import jax

from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels.gpu import kernel_check
from lrkv_jax.kernels.int8 import Int8Rows

IMPLEMENTATIONS = ("auto", "xla", "mosaic", "interpret")
_log = logging.getLogger("lrkv_jax.kernels")
_choices: dict[str, str] = {}


def run(name, xla, mosaic, found, arrays, axes, lengths_B, *, scale, impl, window, **own):
    """Run the implementation of a decode kernel that `choose` takes.

    They are called as `xla(*arrays, lengths, scale)` and `mosaic(plan, *arrays, lengths, scale,
    interpret)`. The last of `arrays` is the page table or None. `found` is (plan, None), or (None,
    the reason why `mosaic` cannot take the arrays); `axes` has the letters of the arrays' axes.
    Where there is a page table ("BN"), arrays with both B and S are pools, of pages and their
    slots. `window` and `own` go to `xla` alone; in the check of the kernel these options have their
    defaults.
    """
    plan, unsupported_reason = found
    if window is not None:
        unsupported_reason = "it reads no windows"
    parts = jax.tree.leaves(arrays, is_leaf=lambda part: isinstance(part, Int8Rows))
    if any(isinstance(part, Int8Rows) for part in parts):
        unsupported_reason = "it reads no int8 cache"

    def failure_reason():
        call = kernel_check.KernelCall.of(mosaic, xla, plan, axes, arrays, scale)
        return kernel_check.failure_reason(call)

    chosen = choose(name, impl, unsupported_reason, failure_reason)
    if chosen == "xla":
        return xla(*arrays, lengths_B, scale, window=window, **own)
    return mosaic(plan, *arrays, lengths_B, scale, chosen == "interpret")


def choose(kernel, impl, unsupported_reason, failure_reason):
    """The implementation to run: "xla", "mosaic" or "interpret".

    `unsupported_reason` is the reason why the Mosaic kernel cannot take the arguments, or None;
    `failure_reason()` the reason why it must not run on this GPU, or None. It is called only
    if nothing else forbids the kernel. Raises `LrkvError` for an unknown name, and for a forced
    kernel that cannot run.
    """
    if impl not in IMPLEMENTATIONS:
        raise LrkvError(f"decode kernel {impl!r} is unknown: use {', '.join(IMPLEMENTATIONS)}")
    if impl == "xla":
        return settle(kernel, impl, "asked for")
    reason = unsupported_reason if impl == "interpret" else _missing_gpu() or unsupported_reason
    failed = None if reason or impl == "interpret" else failure_reason()
    reason = reason or failed
    if impl in ("mosaic", "interpret"):
        if reason:
            raise LrkvError(f"{kernel} cannot run as {impl}: {reason}; use xla")
        return settle(kernel, impl, "asked for")
    chosen = "xla" if reason else "mosaic"
    reason = reason or "it equals XLA on this GPU"
    return settle(kernel, chosen, reason, best="mosaic", loud=bool(failed))


def choices():
    """The last choice for each kernel in this process: {kernel: "xla: reason"}."""
    return dict(_choices)


def settle(kernel, chosen, reason, *, best=None, loud=False):
    """Remember a choice, and log it once unless it was requested; returns it.

    A `loud` one is logged as a warning, and on a GPU process 0 warns of any other than `best`.
    """
    _choices[kernel] = f"{chosen}: {reason}"
    if best:
        worse = jax.default_backend() == "gpu" and chosen != best and jax.process_index() == 0
        _log_once(kernel, chosen, reason, logging.WARNING if worse or loud else logging.INFO)
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


@functools.cache
def _log_once(kernel, chosen, reason, level):
    _log.log(level, "%s runs on %s: %s", kernel, chosen, reason)
