"""A check that hangs, crashes or raises ends with a line, and so does all that it started."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lrkv_jax.lab.doctor.examine import examine
from lrkv_jax.lab.doctor.finding import OK, SLOW, WRONG

TESTS = Path(__file__).parents[2]
MODULE = "support.planted_faults"


@pytest.fixture
def examined(monkeypatch):
    """A function (names of planted checks) that gives what they find, and the report."""

    def run(names, seconds=60.0):
        monkeypatch.setenv("PYTHONPATH", str(TESTS))
        monkeypatch.setenv("PLANTED_CHECKS", names)
        shown = []
        return shown, examine(shown.append, seconds=seconds, module=MODULE)

    return run


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_report_has_every_line_and_its_verdict_is_the_worst(examined):
    shown, report = examined("right raises:ours right")
    assert [one.verdict for one in shown] == [OK, WRONG, OK]
    assert report["doctor"] == WRONG
    assert [f["name"] for f in report["findings"]] == ["right", "raises", "right"]
    assert report["versions"]["lrkv_jax"] and report["date"] and report["host"]
    assert shown[0].measured["process"] not in (os.getpid(), None)
    assert not alive(shown[0].measured["process"])


def test_a_hang_is_one_line_and_ends_with_all_that_it_started(examined, tmp_path):
    began = time.monotonic()
    shown, _ = examined(f"right hangs:{tmp_path / 'pid'} right")
    assert time.monotonic() - began < 20
    assert [one.name for one in shown] == ["right", "hangs"]
    assert shown[1].verdict == WRONG and shown[1].fix == "mend it"
    assert shown[1].says == (
        "did not answer within 2 s (last begun: the second half); what follows was not run"
    )
    assert not alive((tmp_path / "pid").read_text())


def test_a_check_that_the_doctors_own_time_cuts_short_is_not_called_wrong(examined):
    shown, report = examined("hangs", seconds=0.5)
    assert shown[0].verdict == report["doctor"] == SLOW and "time was over" in shown[0].says


@pytest.mark.parametrize(
    ("check", "says", "fix"),
    [
        ("raises:ours", "disk = full: use another", ""),
        ("raises:memory", "RuntimeError: too little memory: RESOURCE_EXHAUSTED", "mend it"),
        ("raises:other", "ValueError: no way", "mend it"),
        ("crashes", "was ended by SIGSEGV; ", "mend it"),
        ("leaves", "ended with 3", "mend it"),
    ],
)
def test_a_crash_or_an_error_is_one_line_that_says_which_and_the_fix(examined, check, says, fix):
    (found,), _ = examined(check)
    assert found.verdict == WRONG and found.says.startswith(says) and found.fix == fix
    assert "\n" not in str(found)


def test_the_process_ends_with_a_doctor_that_was_killed(tmp_path):
    code = "from lrkv_jax.lab.doctor.examine import examine; "
    code += f"examine(print, seconds=1000, module={MODULE!r})"
    marker = tmp_path / "pid"
    # The check that hangs has no other end: its limit is not reached here.
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PLANTED_CHECKS": f"sleeps:{marker}"}
    doctor = subprocess.Popen([sys.executable, "-c", code], env=environment)
    until(lambda: marker.exists() and marker.read_text())
    pid = int(marker.read_text())
    assert alive(pid)
    doctor.kill()
    doctor.wait()
    until(lambda: not alive(pid))


def until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
