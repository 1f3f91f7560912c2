"""The one error that a user can cause."""

import difflib
from collections.abc import Iterable


class LrkvError(Exception):
    """A mistake outside the code: one line that names the thing and the fix.

    The command line prints it and exits with code 2; `--debug` shows the traceback.
    """

    def __init__(self, text: str = ""):
        # Whatever a user's value or a library's message holds, it stays one line.
        super().__init__(" ".join(text.split("\n")))


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown `word`: the nearest of the `known`, or all."""
    known = [str(name) for name in known]
    if not known:
        return ": there is nothing to set there, remove it"
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else f": use one of {', '.join(known)}"


# The meaning of a process's exit code.
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # by Ctrl-C
EXIT_START_AGAIN = 75  # EX_TEMPFAIL: what was saved is sound, and the same command resumes
