"""The sets of midtraining and of the five benchmarks, as text: read, checked, rendered.

`load` reads one by name; each set's `conversation` renders it as the recipe does, `harness` as the
lm-evaluation-harness does. No token ids and no models here.
"""

from lrkv_jax.data.tasks.choices import Choices
from lrkv_jax.data.tasks.gsm8k import Problem
from lrkv_jax.data.tasks.humaneval import Program
from lrkv_jax.data.tasks.registry import (
    DEMO,
    TASKS,
    Example,
    Task,
    fingerprint,
    identity,
    load,
    stream,
    task,
)

__all__ = [
    "DEMO",
    "TASKS",
    "Choices",
    "Example",
    "Problem",
    "Program",
    "Task",
    "fingerprint",
    "identity",
    "load",
    "stream",
    "task",
]
