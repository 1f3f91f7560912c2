"""Runs code that a model wrote, in separate processes that Linux isolates.

docs/evaluation.md lists what this protects from, and what it does not.
"""

from lrkv_jax.evaluation.sandbox.launch import (
    ProgramOutcome,
    SandboxLimits,
    check_sandbox,
    run_programs,
)

__all__ = ["ProgramOutcome", "SandboxLimits", "check_sandbox", "run_programs"]
