"""The examination: checks run in a process that ends with a line where one hangs or crashes."""

import contextlib
import datetime
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lrkv_jax import __version__
from lrkv_jax.lab.doctor.finding import SLOW, WRONG, Finding

AGAIN = "run it again on an idle machine, or with --seconds 300, once what is wrong is mended"
START_SECONDS = 60.0  # JAX loads between two checks
_START: dict[str, Any] = {"begin": "the next check", "fix": AGAIN, "seconds": START_SECONDS}


def examine(
    show: Callable[[Finding], None], *, seconds: float, module: str = "lrkv_jax.lab.doctor.checks"
) -> dict[str, Any]:
    """Run the checks of `module`, show each finding as it comes; the report, ready for JSON.

    What runs after `seconds` is ended. What follows a check that hangs or crashes is not run.
    """
    began, found = time.monotonic(), []
    for one in _findings(module, began + seconds):
        found.append(one)
        show(one)
    facts = {one.name: one.measured for one in found}
    return {
        "doctor": verdict(found),
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


def _findings(module: str, end: float) -> Iterator[Finding]:
    """What the process of `module` finds until it ends, hangs, or the time `end` comes."""
    # Beside other programs: what is not needed is not taken.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", module], env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=printed, start_new_session=True,
        )  # fmt: skip
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        check, until = _START, time.monotonic() + START_SECONDS
        try:
            while line := lines.get(timeout=max(0.0, min(until, end) - time.monotonic())):
                message = json.loads(line)
                if "begin" in message:
                    check = message
                    until = time.monotonic() + check["seconds"]
                elif "found" in message:
                    check, until = _START, time.monotonic() + START_SECONDS
                    yield from (Finding(**one) for one in message["found"])
                else:
                    check = check | message
            if code := process.wait():
                printed.seek(0)
                yield _unfinished(check, WRONG, _how_it_ended(code, printed.read()), check["fix"])
        except queue.Empty:
            if end < until:
                yield _unfinished(check, SLOW, "not done when the doctor's time was over", AGAIN)
            else:
                says = f"did not answer within {check['seconds']:.0f} s"
                yield _unfinished(check, WRONG, says, check["fix"])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.wait()


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue) -> None:
    for line in process.stdout or ():
        lines.put(line)
    lines.put(None)


def _unfinished(check: dict[str, Any], verdict: str, says: str, fix: str) -> Finding:
    begun = f" (last begun: {check['at']})" if "at" in check else ""
    return Finding(check["begin"], verdict, f"{says}{begun}; what follows was not run", fix)


def _how_it_ended(code: int, printed: str) -> str:
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    last = (printed.strip().splitlines() or [""])[-1][:200]
    return f"{how}; {last}" if last else how


def verdict(found: Iterable[Finding]) -> str:
    """The worst of all, or `right`."""
    verdicts = {one.verdict for one in found}
    return next((v for v in (WRONG, SLOW) if v in verdicts), "right")


def sentence(report: dict[str, Any]) -> str:
    """The last line: how many lines are wrong or slow."""
    counts = {v: sum(f["verdict"] == v for f in report["findings"]) for v in (WRONG, SLOW)}
    after = f"{report['seconds']:.0f} s"
    if not any(counts.values()):
        return f"This machine is right for the work ({after})."
    lines = " and ".join(f"{n} {v}" for v, n in counts.items() if n)
    fix = "fix what is wrong first" if counts[WRONG] else "it works, and may work faster"
    return f"{lines} of {len(report['findings'])} lines ({after}): {fix}."
