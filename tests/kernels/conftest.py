"""No interpreted kernel hangs for ever."""

import faulthandler

import pytest


@pytest.fixture(autouse=True)
def _no_hang(request):
    """The interpreter waits for ever if its threads get no processor: end the process instead."""
    # What `cuda` compiles in a separate process ends after 900 seconds.
    faulthandler.dump_traceback_later(1000 if "cuda" in request.keywords else 540, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
