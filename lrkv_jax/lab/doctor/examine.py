"""The examination: checks run one after another, and one that hangs ends it with a line."""

import datetime
import faulthandler
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lrkv_jax import __version__
from lrkv_jax.errors import LrkvError

OK, SLOW, WRONG, NOT_HERE = "ok", "slow", "wrong", "not here"
START_SECONDS = 60.0  # JAX loads between two checks


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    `text` is what was measured, `fix` what to do about it, empty if nothing is to be done.
    `measured` has the same figures in bytes, seconds and their ratios, ready for JSON.
    """

    name: str
    verdict: str
    text: str
    fix: str = ""
    measured: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        text = f"{self.text}: {self.fix}" if self.fix else self.text
        return f"{self.verdict:9}{self.name:24} {text}"


def judged(name: str, faults: dict[str, str], text: str, measured: dict[str, Any]) -> Finding:
    """A finding whose verdict is the worst of `faults`, which maps what is wrong to its verdict.

    The text begins with the faults.
    """
    verdict = next((v for v in (WRONG, SLOW) if v in faults.values()), OK)
    return Finding(name, verdict, "; ".join([*faults, text]), "", measured)


class Check(NamedTuple):
    """A check that may take `seconds`; `fix` is for what it finds wrong."""

    name: str
    seconds: float
    fix: str
    run: Callable[[], Finding | list[Finding]]


Facts = dict[str, dict[str, Any]]  # what each line measured, by its name
Plan = Callable[[Facts], Iterable[Check]]


def examine(
    show: Callable[[Finding], None], begin: Callable[[str], None], *, seconds: float, plan: Plan
) -> dict[str, Any]:
    """Run the checks, and announce and show each; returns the report, ready for JSON.

    A check that runs after `seconds`, or longer than it may, is given up, and what follows it is
    not run. Its thread still runs then: leave by `os._exit`.
    """
    faulthandler.enable()  # a crash prints which check it was in
    began, found = time.monotonic(), []
    for one in _findings(plan, began + seconds, begin):
        found.append(one)
        show(one)
    facts = {one.name: one.measured for one in found}
    verdicts = {one.verdict for one in found}
    return {
        "doctor": next((v for v in (WRONG, SLOW) if v in verdicts), "right"),
        "seconds": time.monotonic() - began,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "device": facts.get("devices", {}).get("kind"),
        "versions": {
            "lrkv_jax": __version__,
            "python": platform.python_version(),
            **{name: facts.get("packages", {}).get(name) for name in ("jax", "jaxlib")},
        },
        "findings": [vars(one) for one in found],
    }


def _findings(plan: Plan, end: float, begin: Callable[[str], None]) -> Iterator[Finding]:
    """Findings of the checks until the last one ends, one hangs, or the time `end` comes."""
    messages: queue.SimpleQueue[Check | list[Finding] | None] = queue.SimpleQueue()
    threading.Thread(target=_run, args=(plan, messages), daemon=True).start()
    starting = "the next check", ""
    (name, fix), until = starting, time.monotonic() + START_SECONDS
    try:
        while message := messages.get(timeout=max(0.0, min(until, end) - time.monotonic())):
            if isinstance(message, Check):
                name, fix, until = message.name, message.fix, time.monotonic() + message.seconds
                begin(f"{name}, {message.seconds:.0f} s at most")
            else:
                yield from message
                (name, fix), until = starting, time.monotonic() + START_SECONDS
    except queue.Empty:
        if end < until:
            text, verdict = "not done when the doctor's time was over", SLOW
            fix = "run it again on an idle machine, or with --seconds 300"
        else:
            text, verdict = "did not answer in time", WRONG
        yield Finding(name, verdict, f"{text}; what follows was not run", fix)


def _run(plan: Plan, messages: queue.SimpleQueue) -> None:
    """Put each check into the queue, then what it finds, and None after the last."""
    facts: Facts = {"driver": {}, "devices": {}}
    try:
        for check in plan(facts):
            messages.put(check)
            found = _answer(check)
            facts.update({one.name: one.measured for one in found})
            messages.put(found)
    except Exception as error:  # what the next check needs cannot be imported
        messages.put([_failure("the next check", error)])
    messages.put(None)


def _answer(check: Check) -> list[Finding]:
    """The findings of a check; what it raises becomes one."""
    try:
        found = check.run()
    except LrkvError as error:
        return [Finding(check.name, WRONG, str(error))]
    except Exception as error:
        return [_failure(check.name, error, check.fix)]
    return [
        replace(one, fix=check.fix) if one.verdict in (SLOW, WRONG) else one
        for one in (found if isinstance(found, list) else [found])
    ]


def _failure(name: str, error: Exception, fix: str = "") -> Finding:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return Finding(name, WRONG, text, fix)


def sentence(report: dict[str, Any]) -> str:
    """The last line: how many lines are wrong or slow."""
    counts = {v: sum(f["verdict"] == v for f in report["findings"]) for v in (WRONG, SLOW)}
    after = f"{report['seconds']:.0f} s"
    if not any(counts.values()):
        return f"This machine is right for the work ({after})."
    lines = " and ".join(f"{n} {v}" for v, n in counts.items() if n)
    fix = "fix what is wrong first" if counts[WRONG] else "it works, and may work faster"
    return f"{lines} of {len(report['findings'])} lines ({after}): {fix}."
