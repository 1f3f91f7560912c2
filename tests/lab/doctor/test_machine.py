"""What is planted around the devices is found: versions, driver, memory and disk."""

import os
import stat
import time

import pytest

from lrkv_jax.lab.doctor import machine, versions
from lrkv_jax.lab.doctor.checks import Check, answer
from lrkv_jax.lab.doctor.finding import OK, SLOW, WRONG

WHEELS = {
    "jax-cuda13-plugin": "0.12.0.1",
    "nvidia-cudnn-cu13": "9.15.0.57",
    "nvidia-nccl-cu13": "2.28.3",
}
WANTS = ("nvidia-cudnn-cu13<10.0,>=9.12.0.46", "nvidia-nccl-cu13>=2.27.7")


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A function that installs the metadata of these wheels, as pip leaves it."""

    def install(**changes):
        for name, version in {**WHEELS, **changes}.items():
            if version is None:
                continue
            folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            folder.mkdir(parents=True)
            lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
            if "plugin" in name:
                marker = 'sys_platform == "linux" and extra == "with-cuda"'
                lines += [f"Requires-Dist: {want}; {marker}" for want in WANTS]
            (folder / "METADATA").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A function that puts a script in nvidia-smi's place."""

    def put(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return put


def test_cuda_wheels_that_the_plugin_wants_are_right(wheels):
    wheels()
    found = versions.packages(gpus=1)
    assert found.verdict == OK and "nvidia-cudnn-cu13 9.15.0.57" in found.says
    assert found.measured["jax"] and found.measured["optax"]


@pytest.mark.parametrize(
    ("name", "version", "says"),
    [
        ("nvidia-cudnn-cu13", "9.1.0.70", "nvidia-cudnn-cu13 is 9.1.0.70, and jax-cuda13-plugin"),
        ("nvidia-cudnn-cu13", "10.0.0", "wants <10.0,>=9.12.0.46"),
        ("nvidia-nccl-cu13", None, "nvidia-nccl-cu13 is missing"),
    ],
)
def test_a_wrong_cudnn_or_a_missing_nccl_is_found_in_the_wheels(wheels, name, version, says):
    wheels(**{name: version})
    found = versions.packages(gpus=1)
    assert found.verdict == WRONG and says in found.says


def test_gpus_without_a_plugin_are_wrong(monkeypatch):
    monkeypatch.setattr(versions, "PLUGINS", {})  # this machine may have one
    assert versions.packages(gpus=2).verdict == WRONG
    assert versions.packages(gpus=0).verdict == OK


ROW = "NVIDIA H200, 580.95.05, 143771, 4, 31"


@pytest.mark.parametrize(
    ("script", "verdict", "says"),
    [
        (f"echo '{ROW}'; echo '{ROW}'", OK, "2 x NVIDIA H200, driver 580.95.05, 31 degrees C"),
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", WRONG, "ends with 9: NVIDIA-SMI has failed"),
        ("echo 'No devices were found'", WRONG, "ends with 0: No devices were found"),
        (f"echo '{ROW.replace(', 4,', ', 99999,')}'", SLOW, "98 GiB of GPU 0 are in use"),
    ],
)
def test_a_driver_that_is_broken_or_whose_gpu_is_taken_is_found(nvidia_smi, script, verdict, says):
    nvidia_smi(script)
    found = versions.driver()
    assert found.verdict == verdict and says in found.says


def test_a_driver_too_old_for_cuda_is_found():
    rows = [ROW.replace("580.95.05", "570.10").split(", ")]
    assert versions.check_driver(rows, 13).verdict == WRONG
    assert versions.check_driver(rows, 12).verdict == OK


@pytest.mark.parametrize(("free", "verdict"), [(1, WRONG), (3, SLOW), (20, OK)])
def test_too_little_memory_is_found(free, verdict):
    assert machine.check_memory(25 << 30, free << 30).verdict == verdict


def test_the_memory_is_what_the_kernel_says():
    found = machine.memory()
    assert 0 < found.measured["free_bytes"] <= found.measured["total_bytes"]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found.measured["total_bytes"] <= pages


def test_a_slow_disk_is_found_by_its_rate_and_by_its_small_files(tmp_path, monkeypatch):
    real = os.fsync

    def slow(descriptor):
        time.sleep(0.15)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    found = machine.disk(str(tmp_path), lasting=0.3)
    assert found.verdict == SLOW
    assert "under 100 MB/s" in found.says and "over 100 ms a small file" in found.says
    assert found.measured["small_file_seconds"] > 0.15
    assert list(tmp_path.iterdir()) == []


def test_a_disk_with_no_room_and_one_that_cannot_be_written_are_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "LEAST_DISK", 1 << 60)
    assert machine.disk(str(tmp_path), lasting=0.01).verdict == WRONG
    (found,) = answer(Check("disk", 20, "another", lambda: machine.disk(f"{tmp_path}/none", 0.01)))
    assert found.verdict == WRONG and "none" in found.says and found.fix == "another"
