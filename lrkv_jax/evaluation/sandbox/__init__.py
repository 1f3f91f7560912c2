"""Runs code that a model wrote, in separate processes, behind what the kernel offers.

docs/sandbox.md says what it protects from, and from what it does not.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from lrkv_jax.distributed.device import usable_cores
from lrkv_jax.evaluation.sandbox import launch
from lrkv_jax.evaluation.sandbox.isolation import Isolation, isolation
from lrkv_jax.evaluation.sandbox.launch import ProgramOutcome, SandboxLimits

__all__ = ["Isolation", "ProgramOutcome", "SandboxLimits", "isolation", "run_programs"]


def run_programs(
    programs: Sequence[str], *, limits: SandboxLimits | None = None, workers: int | None = None
) -> list[ProgramOutcome]:
    """Run Python programs on the standard library alone, `workers` at a time, in any order.

    Unless given, `workers` are as many as there are cores. Outcomes are in the programs' order.
    Raises LrkvError where no sandbox works on this machine (`isolation`).
    """
    way, limits = isolation().way, limits or SandboxLimits()
    pool = ThreadPoolExecutor(workers or usable_cores(), thread_name_prefix="sandbox")
    try:
        return list(pool.map(lambda program: launch.run(program, limits, way), programs))
    finally:
        # Interrupted, it ends after the programs that run, not after all of them.
        pool.shutdown(cancel_futures=True)
