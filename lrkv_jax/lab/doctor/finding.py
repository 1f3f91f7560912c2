"""What a check finds, and how it reports where it is; nothing here loads JAX."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

OK, SLOW, WRONG, NOT_HERE = "ok", "slow", "wrong", "not here"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    `says` is what was measured, `fix` what to do about it, empty where nothing is to be done.
    `measured` has the same figures in bytes, seconds and their ratios, ready for JSON.
    """

    name: str
    verdict: str
    says: str
    fix: str = ""
    measured: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"{self.says}: {self.fix}" if self.fix else self.says
        return f"{self.verdict:9}{self.name:24} {text}"


def judged(
    name: str, faults: dict[str, str], says: str, measured: dict[str, Any], fix: str = ""
) -> Finding:
    """A finding whose verdict is the worst of `faults`, which maps what is amiss to its verdict.

    The text is `says`, after the faults if there are any. `fix` is its check's unless given.
    """
    if not faults:
        return Finding(name, OK, says, "", measured)
    verdict = WRONG if WRONG in faults.values() else SLOW
    return Finding(name, verdict, "; ".join([*faults, says]), fix, measured)


# Set by the process that runs the checks.
on_progress: Callable[[str], None] | None = None


def at(what: str) -> None:
    """What the running check begins: named where it never ends."""
    if on_progress is not None:
        on_progress(what)
