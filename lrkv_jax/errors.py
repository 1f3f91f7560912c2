"""The one error that a user can cause."""

import difflib
import operator
from collections.abc import Iterable
from typing import Any

# The meaning of a process's exit code.
EXIT_FAULT = 1  # of the program: Python's, with a traceback
EXIT_BAD_INPUT = 2  # the same command fails again
EXIT_UNAVAILABLE = 69  # EX_UNAVAILABLE: it may be there at another time, or on another host
EXIT_INTERRUPTED = 130  # by Ctrl-C
EXIT_START_AGAIN = 75  # EX_TEMPFAIL: what was saved is sound, and the same command resumes


class LrkvError(Exception):
    """A mistake outside the code: one line that names the thing and the fix.

    The command line prints it and exits with `exit_code`; `--debug` shows the traceback.
    """

    def __init__(self, text: str = "", exit_code: int = EXIT_BAD_INPUT):
        # Whatever a user's value or a library's message holds, it stays one line.
        super().__init__(" ".join(text.split("\n")))
        self.exit_code = exit_code


def whole(name: str, value: Any) -> int:
    """The value as a whole number; raises `LrkvError` for what is none, as 2.0."""
    try:
        return operator.index(value)
    except TypeError:
        raise LrkvError(f"{name} = {value!r}: use a whole number") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown `word`: the nearest of the `known`, or all."""
    known = [str(name) for name in known]
    if not known:
        return ": there is nothing to set there, remove it"
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else f": use one of {', '.join(known)}"
