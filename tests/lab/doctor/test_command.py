"""The real command: this machine is right for the work, and each planted fault is found."""

import json
import os
import subprocess
import sys

import pytest

# Python runs this in every process whose path it lies on: faults are planted where they would be.
PLANTED = """
import os, time

def slow_fsync(descriptor, real=os.fsync):
    time.sleep(0.15)
    real(descriptor)

os.fsync = slow_fsync
"""


def doctor(tmp_path, **environment):
    """(exit code, report, findings) of `lrkv doctor`, in an empty folder and without a cache.

    It has the time that a machine of half this one's speed needs; docs/doctor.md has what it took.
    """
    base = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    base = {k: v for k, v in base.items() if not k.startswith("JAX_")}
    folder = tmp_path / "here"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "lrkv_jax.cli", "doctor", "--json", "--seconds", "300"],
        cwd=folder, capture_output=True, text=True,
        env=base | {"LRKV_COMPILATION_CACHE": "off", **environment},
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert list(folder.iterdir()) == []
    assert len(done.stderr.splitlines()) == len(report["findings"])
    return done.returncode, report, {f["name"]: f for f in report["findings"]}


@pytest.mark.timed
def test_this_machine_is_right_for_the_work(tmp_path):
    code, report, lines = doctor(tmp_path)
    assert code == 0 and report["doctor"] != "wrong"
    assert not [line for line in lines.values() if line["verdict"] == "wrong"]
    assert report["versions"]["jax"] and report["date"] and report["device"]
    assert lines["device 0: copies"]["measured"]["bytes_per_second"] > 0


@pytest.mark.timed
def test_each_planted_fault_is_found(tmp_path):
    planted = tmp_path / "planted"
    wheels = {"jax-cuda13-plugin": "0.12.0.1", "nvidia-cudnn-cu13": "9.1.0.70"}
    for name, version in wheels.items():
        folder = planted / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        if "plugin" in name:
            text += 'Requires-Dist: nvidia-cudnn-cu13>=9.12; extra == "with-cuda"\n'
        (folder / "METADATA").write_text(text)
    (planted / "sitecustomize.py").write_text(PLANTED)
    code, report, lines = doctor(tmp_path, PYTHONPATH=str(planted))
    assert code == 2 and report["doctor"] == "wrong"
    found = lines["packages"]
    assert found["verdict"] == "wrong" and "nvidia-cudnn-cu13 is 9.1.0.70" in found["says"]
    assert lines["disk"]["verdict"] == "slow" and lines["disk"]["fix"]
