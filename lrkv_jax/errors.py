"""The one error that a user can cause."""


class LrkvError(Exception):
    """A mistake outside the code: one line that names the thing and the mend.

    The command line prints it and exits with code 2; `--debug` shows the traceback.
    """
