"""The command line: one thin command per verb. Everything heavy is imported inside its command."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable

from lrkv_jax.cli import analyze, bench, checkpoints, commands, data, harness, runs, sweep
from lrkv_jax.cli.shared import app
from lrkv_jax.errors import EXIT_BAD_INPUT, LrkvError

# For news of a lost process to arrive, which ends this one.
PEERS_SECONDS = 3

__all__ = [
    "analyze", "app", "bench", "checkpoints", "commands", "data", "harness", "main", "runs",
    "sweep",
]  # fmt: skip


def main() -> None:
    """Entry point: user errors become one line and exit code 2, unless --debug is given."""
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        app()
    except SystemExit as end:
        _end(end.code)
    except LrkvError as error:
        if debug:
            raise
        if str(error):
            print(f"lrkv: {_who()}{error}", file=sys.stderr)
        _leave_others(EXIT_BAD_INPUT)
        _end(EXIT_BAD_INPUT)
    except Exception as error:
        _let_peers_speak(error)
        _leave_others(1, show=traceback.print_exc)
        raise


def _end(code: int | str | None) -> None:
    """Exit in order, unless something would hold that up."""
    processes = sys.modules.get("lrkv_jax.runtime.processes")
    if processes is not None and processes.end_at_once and isinstance(code, int):
        processes.leave(code)
    sys.exit(code)


def _who() -> str:
    """Which of several processes this is, where the error is its own."""
    processes = sys.modules.get("lrkv_jax.runtime.processes")
    if processes is None or not processes.must_leave() or processes.index() == 0:
        return ""
    return f"{processes.name(processes.index())}: "


def _let_peers_speak(error: Exception) -> None:
    """A collective fails because of a process that was lost: who that is, says it better."""
    processes = sys.modules.get("lrkv_jax.runtime.processes")
    if processes is not None and processes.must_leave():
        import jax

        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(PEERS_SECONDS)


def _leave_others(code: int, show: Callable[[], None] = lambda: None) -> None:
    """End at once if this is one of several processes: an ordinary exit waits for the others."""
    processes = sys.modules.get("lrkv_jax.runtime.processes")
    if processes is not None and processes.must_leave():
        show()
        processes.leave(code)
