"""The time to the first step is accounted for, phase by phase."""

import os
import subprocess
import sys
import time

import pytest

from lrkv_jax.distributed.startup import Startup


def test_phases_add_up_to_the_whole():
    startup = Startup()
    for name in ("data", "compile", "data"):
        time.sleep(0.02)
        startup.phase(name)
    row = startup.row()
    assert set(row) == {"startup_seconds", "startup_data", "startup_compile"}
    assert row["startup_data"] + row["startup_compile"] == pytest.approx(row["startup_seconds"])
    assert row["startup_data"] > row["startup_compile"] > 0.015
    assert str(startup).startswith("first step after 0.") and "data 0." in str(startup)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux's /proc")
def test_a_command_counts_from_when_it_was_started():
    code = (
        "import time; time.sleep(0.5)\n"
        "from lrkv_jax.distributed.startup import Startup\n"
        "startup = Startup.of_the_process(); startup.phase('imports'); print(startup.seconds)"
    )
    began = time.monotonic()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The clock in /proc ticks a hundred times a second.
    assert 0.5 <= float(run.stdout) <= time.monotonic() - began + 0.02
