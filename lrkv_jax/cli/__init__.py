"""The command line: one thin command per verb. Everything heavy is imported inside its command."""

import contextlib
import errno
import gc
import logging
import os
import sys
import traceback
from typing import Any

import typer

from lrkv_jax.cli import bench, commands, data, interop, overview, report, runs, serve, sweep
from lrkv_jax.cli.shared import app
from lrkv_jax.distributed.processes import HERE
from lrkv_jax.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAULT,
    EXIT_INTERRUPTED,
    EXIT_UNAVAILABLE,
    LrkvError,
)

# Typer bundles click or depends on it, by version; its public name for this is a child.
UsageError: Any = typer.BadParameter.__base__


def entry() -> None:
    """The command `lrkv`: `main`, and then the process ends, also where an exit would wait."""
    try:
        main()
    except SystemExit as end:
        if HERE.end_at_once and isinstance(end.code, int):
            HERE.leave(end.code)
        raise


def main() -> None:
    """Run a command: user errors become one line and their exit code, unless --debug is given.

    Raises `SystemExit` with the exit code. Only where another process of the run has to
    learn of an error does it end this one itself.
    """
    # None where the caller closed it (`>&-`): what prints, and ends a process, needs a stream.
    if sys.stdout is None:
        sys.stdout = sys.__stdout__ = open(os.devnull, "w")  # type: ignore[misc]  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = sys.__stderr__ = open(os.devnull, "w")  # type: ignore[misc]  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    # Their encoding may lack a character; what comes in may not be of it.
    for stream, errors in (
        (sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):  # fmt: skip
        if hasattr(stream, "reconfigure"):
            with contextlib.suppress(OSError):  # one that was read from already
                stream.reconfigure(errors=errors)
    # XLA's alarm of asterisks, after two minutes of compiling, is an error to its log.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Orbax's and TFDS's log: what fails there is raised too, and reported in one line. Its level
    # would not last: TFDS's is set around each call (`data.records.folders.quiet`).
    logging.getLogger("absl").disabled = True
    # Imports and JAX's tracing make many objects, of which few are garbage: Python's default looks
    # for it after 700 of them, for a tenth of the time to a first step.
    gc.set_threshold(50_000)
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    try:
        code = app(prog_name="lrkv", standalone_mode=False)
        if code == EXIT_INTERRUPTED:  # by Ctrl-C
            _print_error("interrupted")
        sys.stdout.flush()  # what cannot be printed is an error, and not the end of a command
        _end(code)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a page, not a mistake
            print(error, file=sys.stderr)
            _end(EXIT_BAD_INPUT)
        text = _one_line(error)
        if text is None or debug:
            if HERE.must_leave():
                traceback.print_exception(error)
                HERE.leave(EXIT_FAULT)
            raise
        if text:  # empty where another process prints it
            _print_error(text)
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        code = getattr(error, "exit_code", EXIT_UNAVAILABLE if full else EXIT_BAD_INPUT)
        if HERE.must_leave():  # an ordinary exit waits for the others
            HERE.leave(code)
        _end(code)


def _one_line(error: Exception) -> str | None:
    """The message of an error that the user can fix; None for a fault of the program."""
    if isinstance(error, LrkvError):
        return str(error)
    if isinstance(error, UsageError):
        return _usage(error)
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return None


def _usage(error: Any) -> str:
    """The error in a command line, and the help page or the setting that fixes it."""
    path = error.ctx.command_path if error.ctx else "lrkv"
    message = error.format_message().rstrip(".")
    settings = ""
    if getattr(error, "option_name", None):
        settings = " (settings have no dashes, as in train.steps=100)"
    return f"{message[:1].lower()}{message[1:]}{settings}: see {path} --help"


def _print_error(text: str) -> None:
    """Print one line on stderr, whatever breaks a path or a message contains."""
    who = HERE.who() if HERE.must_leave() else ""
    with contextlib.suppress(OSError):
        print(*f"lrkv: {who}{text}".splitlines(), file=sys.stderr)


def _end(code: int | str | None) -> None:
    """Exit, also when the remaining output cannot be printed."""
    try:
        sys.stdout.flush()
    except OSError:  # Python would try again, and exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
