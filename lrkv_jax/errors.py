"""The one error that a user can cause."""


class LrkvError(Exception):
    """A mistake outside the code: one line that names the thing and the mend.

    The command line prints it and exits with code 2; `--debug` shows the traceback.
    """

    def __init__(self, text: str = ""):
        # Whatever a user's value or a library's message holds, it stays one line.
        super().__init__(" ".join(text.split("\n")))


# What a process's exit code says.
EXIT_BAD_INPUT = 2
EXIT_START_AGAIN = 75  # EX_TEMPFAIL: what was saved is sound, and the same command goes on
