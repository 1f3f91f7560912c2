"""The real command: this machine is right for the work, and a planted fault is found."""

import json
import os
import subprocess
import sys

import pytest

# Python runs this in every process whose path it lies on.
PLANTED = """
import os, time

def slow_fsync(descriptor, real=os.fsync):
    time.sleep(0.15)
    real(descriptor)

os.fsync = slow_fsync
"""


@pytest.mark.timed
@pytest.mark.parametrize("planted", [False, True])
def test_this_machine_is_right_for_the_work_until_a_fault_is_planted(tmp_path, planted):
    base = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    base = {k: v for k, v in base.items() if not k.startswith("JAX_")}
    if planted:
        (tmp_path / "sitecustomize.py").write_text(PLANTED)
        base["PYTHONPATH"] = str(tmp_path)
    folder = tmp_path / "here"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "lrkv_jax.cli", "doctor", "--json", "--seconds", "300"],
        cwd=folder, capture_output=True, text=True, env=base | {"LRKV_COMPILATION_CACHE": "off"},
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["doctor"] != "wrong"
    assert list(folder.iterdir()) == []
    assert len(done.stderr.splitlines()) == len(report["findings"])
    assert report["versions"]["jax"] and report["date"] and report["device"]
    lines = {finding["name"]: finding for finding in report["findings"]}
    assert lines["device 0: copies"]["measured"]["bytes_per_second"] > 0
    if planted:
        assert lines["disk"]["verdict"] == "slow" and lines["disk"]["fix"]
