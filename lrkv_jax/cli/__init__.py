"""The command line: one thin command per verb. Everything heavy is imported inside its command."""

import contextlib
import os
import sys
import traceback

from lrkv_jax.cli import (
    analyze,
    bench,
    checkpoints,
    commands,
    data,
    doctor,
    harness,
    interop,
    report,
    runs,
    serve,
    sweep,
)
from lrkv_jax.cli.shared import app
from lrkv_jax.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, LrkvError
from lrkv_jax.runtime.processes import HERE


def entry() -> None:
    """The command `lrkv`: `main`, and then the process ends, also where an exit would wait."""
    try:
        main()
    except SystemExit as end:
        if HERE.end_at_once and isinstance(end.code, int):
            HERE.leave(end.code)
        raise


def main() -> None:
    """Run a command: user errors become one line and exit code 2, unless --debug is given.

    Raises `SystemExit` with the exit code. Only where another process of the run has to learn of
    an error does it end this one itself.
    """
    for stream in (sys.stdout, sys.stderr):  # whose encoding may lack a character
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    # XLA's alarm of asterisks, after two minutes of compiling, is an error to its log.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        app()  # which exits with 130 after Ctrl-C
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED:
            _complain("interrupted")
        _end(end.code)
    except Exception as error:
        text = _one_line(error)
        if text is None or debug:
            if HERE.must_leave():
                traceback.print_exception(error)
                HERE.leave(1)
            raise
        if text:  # empty where another process says it
            _complain(text)
        if HERE.must_leave():  # an ordinary exit waits for the others
            HERE.leave(EXIT_BAD_INPUT)
        _end(EXIT_BAD_INPUT)


def _one_line(error: Exception) -> str | None:
    """What to say of an error that is the user's to mend; None for a fault of the program."""
    if isinstance(error, LrkvError):
        return str(error)
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return None


def _complain(text: str) -> None:
    """Print one line on stderr, whatever characters a path or a message contains."""
    who = HERE.who() if HERE.must_leave() else ""
    with contextlib.suppress(OSError):
        line = " ".join(f"lrkv: {who}{text}".splitlines())
        print(line.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)


def _end(code: int | str | None) -> None:
    """Exit, also when what is left to print cannot be printed."""
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again, and exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
