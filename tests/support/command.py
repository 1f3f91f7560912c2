"""`lrkv` in this process."""

import sys

import pytest

from lrkv_jax.cli import main


def lrkv(capsys, monkeypatch, *arguments):
    """(exit code, stdout, stderr) of `lrkv ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["lrkv", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code or 0, *capsys.readouterr()
