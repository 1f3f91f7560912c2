"""Runs code that a model wrote, in separate processes, behind what the kernel offers.

docs/evaluation.md says what it protects from, and from what it does not.
"""

from lrkv_jax.evaluation.sandbox.launch import (
    ProgramOutcome,
    SandboxLimits,
    check_sandbox,
    run_programs,
)

__all__ = ["ProgramOutcome", "SandboxLimits", "check_sandbox", "run_programs"]
