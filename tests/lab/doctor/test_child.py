"""A check that hangs, crashes or raises ends with a line, and the next one is answered."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lrkv_jax.lab.doctor.child import Check, ask, checker
from lrkv_jax.lab.doctor.examine import examine
from lrkv_jax.lab.doctor.finding import OK, SLOW, WRONG

TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def check(function, seconds=20.0, **arguments):
    name = f"support.planted_faults:{function}"
    return Check(function, name, seconds, "mend it", arguments)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_checks_share_a_process_whose_prints_disturb_nothing():
    with checker() as child:
        (first,), (second,) = (ask(child, check("right", value=n)) for n in (1, 2))
    assert (first.says, second.says) == ("1", "2")
    assert second.measured == {"times": 2, "process": first.measured["process"]}
    assert not alive(first.measured["process"])


def test_a_hang_is_one_line_and_ends_with_all_that_it_started(tmp_path):
    began = time.monotonic()
    with checker() as child:
        (found,) = ask(child, check("hangs", 1.5, marker=str(tmp_path / "pid")))
        assert time.monotonic() - began < 10
        (after,) = ask(child, check("right"))
    assert found.verdict == WRONG and found.mend == "mend it"
    assert found.says == "did not answer within 2 s (last begun: the second half)"
    assert after.verdict == OK and after.measured["times"] == 1
    assert not alive((tmp_path / "pid").read_text())


def test_a_check_that_the_doctors_own_time_cuts_short_is_not_called_wrong():
    with checker() as child:
        (found,) = ask(child, check("hangs", 20), left=1.0)
    assert found.verdict == SLOW and "time was over" in found.says


ENDS = (
    (check("raises", kind="ours"), "disk = full: use another"),
    (check("raises", kind="memory"), "RuntimeError: too little memory: RESOURCE_EXHAUSTED"),
    (check("raises", kind="other"), "ValueError: no way"),
    (check("missing"), "AttributeError: "),
    (check("crashes"), "was ended by SIGSEGV; "),
    (check("leaves"), "ended with 3"),
)


def test_a_crash_or_an_error_is_one_line_that_says_which_and_the_mend():
    with checker() as child:
        for planted, says in ENDS:
            (found,) = ask(child, planted)
            assert found.verdict == WRONG and found.says.startswith(says)
            assert "\n" not in str(found)
            assert found.mend == ("" if says.startswith("disk") else "mend it")
        assert ask(child, check("right"))[0].verdict == OK


def test_the_process_ends_with_a_doctor_that_was_killed(tmp_path):
    code = """
import os, sys
from lrkv_jax.lab.doctor.child import Check, ask, checker
child = checker()
check = Check("hangs", "support.planted_faults:hangs", 1000, "", {})
import threading, time
threading.Thread(target=ask, args=(child, check), daemon=True).start()
while child._process is None: time.sleep(0.01)
print(child._process.pid, flush=True)
time.sleep(1000)
"""
    doctor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(doctor.stdout.readline())
    assert alive(pid)
    doctor.kill()
    doctor.wait()
    doctor.stdout.close()
    for _ in range(100):
        if not alive(pid):
            break
        time.sleep(0.1)
    assert not alive(pid)


def test_the_report_has_every_line_and_its_verdict_is_the_worst():
    shown = []
    names = ("right", "leaves", "right")

    def which(facts):
        for name in names:
            yield check(name)
            if name == "right":
                assert facts["right"]["process"]  # an earlier line's figures are there

    report = examine(shown.append, which, seconds=100.0)
    assert [one.verdict for one in shown] == [OK, WRONG, OK]
    assert report["doctor"] == WRONG
    assert [f["name"] for f in report["findings"]] == list(names)
    assert report["versions"]["lrkv_jax"] and report["date"] and report["host"]
    late = examine(shown.append, lambda facts: [check("right")], seconds=-1.0)
    assert late["doctor"] == SLOW and "not begun" in late["findings"][0]["says"]
    assert os.getpid() != shown[0].measured["process"]
