"""Checks run in a process of their own, so that one that hangs or crashes ends with a line.

One process answers one check after another, so that JAX is loaded once.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lrkv_jax.distributed.child import Child, ChildEnded, News, answer_jobs
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.doctor import finding
from lrkv_jax.lab.doctor.finding import SLOW, WRONG, Finding

AGAIN = "run it again on an idle machine, or with --seconds 300, once what is wrong is mended"


@dataclass(frozen=True)
class Check:
    """A function `module:name` of the arguments that gives a finding or a list of them.

    It may take `seconds`; `mend` is what to do where it does not end, crashes or raises, and where
    a finding that is slow or wrong names no other.
    """

    name: str
    function: str
    seconds: float
    mend: str
    arguments: dict[str, Any] = field(default_factory=dict)


def checker() -> Child:
    """The process that runs checks; a context manager, which ends it."""
    # Beside other programs: what is not asked for is not taken.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    return Child("lrkv_jax.lab.doctor.child", environment)


def ask(child: Child, check: Check, left: float = float("inf")) -> list[Finding]:
    """The findings of a check, of which the time `left` to the doctor may leave it less."""
    if left <= 0:
        return [Finding(check.name, SLOW, "not begun when the doctor's time was over", AGAIN)]
    child.start()  # anew, if the check before this one ended it
    limit, begun = min(check.seconds, left), ""

    def note(what: str) -> None:
        nonlocal begun
        begun = f" (last begun: {what})"

    try:
        return [Finding(**one) for one in child.ask(asdict(check), note, limit)]
    except ChildEnded as ended:
        says = f"{ended}{begun}"
    except TimeoutError:
        says = f"did not answer within {limit:.0f} s{begun}"
        if limit < check.seconds:
            says = f"not done when the doctor's time was over{begun}"
            return [Finding(check.name, SLOW, says, AGAIN)]
    return [Finding(check.name, WRONG, says, check.mend)]


def answer(job: dict[str, Any]) -> list[Finding]:
    """The findings of a job; what its function raises becomes one."""
    module, _, name = job["function"].partition(":")
    try:
        found = getattr(importlib.import_module(module), name)(**job["arguments"])
    except LrkvError as error:
        return [Finding(job["name"], WRONG, str(error))]
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
            text = f"too little memory: {text}"
        return [Finding(job["name"], WRONG, f"{type(error).__name__}: {text[:200]}", job["mend"])]
    found = found if isinstance(found, list) else [found]
    bad = (SLOW, WRONG)
    return [replace(f, mend=f.mend or job["mend"]) if f.verdict in bad else f for f in found]


def _answer(job: dict[str, Any], news: News) -> list[dict[str, Any]]:
    finding.news = news
    return [asdict(one) for one in answer(job)]


if __name__ == "__main__":
    answer_jobs(_answer)
