"""`lrkv` in this process."""

import logging
import os
import sys

import jax
import pytest

from lrkv_jax.cli import main


def lrkv(capsys, monkeypatch, *arguments):
    """(exit code, stdout, stderr) of `lrkv ARGUMENTS`, which leaves this process as it was.

    `lrkv bench train` goes without the compiled programs that are kept; the tests after it do not.
    """
    monkeypatch.setattr(sys, "argv", ["lrkv", *map(str, arguments)])
    kept, environment = jax.config.jax_enable_compilation_cache, dict(os.environ)
    try:
        with pytest.raises(SystemExit) as end:
            main()
            sys.exit(0)
    finally:
        jax.config.update("jax_enable_compilation_cache", kept)
        os.environ.clear()
        os.environ.update(environment)
        logging.getLogger("absl").disabled = False
    return end.value.code or 0, *capsys.readouterr()
