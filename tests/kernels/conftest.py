"""No interpreted kernel hangs for ever."""

import faulthandler

import pytest


@pytest.fixture(autouse=True)
def _no_hang():
    """The interpreter waits for ever if its threads get no processor: end the process instead."""
    faulthandler.dump_traceback_later(540, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
