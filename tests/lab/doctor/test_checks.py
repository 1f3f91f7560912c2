"""What is planted around and in the devices is found, and no check stops the doctor's report."""

import json
import os
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from lrkv_jax.distributed.hardware import hardware
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench import clock
from lrkv_jax.lab.doctor import devices, host
from lrkv_jax.lab.doctor import examine as examination
from lrkv_jax.lab.doctor.examine import OK, SLOW, WRONG, Check, Finding, examine, sentence

H200 = hardware("h200")
RIGHT = Check("right", 5, "", lambda: Finding("right", OK, "it is", "", {"count": 2}))
HANGS = Check("hangs", 0.3, "mend it", lambda: time.sleep(1000))


def examined(*checks, seconds=60.0):
    def plan(facts):
        yield from checks
        assert facts["right"] == {"count": 2}  # an earlier line's figures are there
        raise ImportError("no JAX")  # between two checks

    shown = []
    return shown, examine(shown.append, lambda what: None, seconds=seconds, plan=plan)


def test_the_report_has_every_line_and_its_verdict_is_the_worst():
    full = Check("disk", 5, "", Mock(side_effect=LrkvError("disk = full: use another")))
    other = Check("other", 5, "mend it", Mock(side_effect=ValueError("no\nway")))
    shown, report = examined(RIGHT, full, other, RIGHT)
    assert [one.verdict for one in shown] == [OK, WRONG, WRONG, OK, WRONG]
    assert (shown[1].text, shown[1].fix) == ("disk = full: use another", "")
    assert (shown[2].text, shown[2].fix) == ("ValueError: no way", "mend it")
    assert "no JAX" in shown[4].text
    assert report["doctor"] == WRONG and len(report["findings"]) == 5
    assert report["versions"]["lrkv_jax"] and report["date"] and report["host"]
    assert sentence(report).startswith("3 wrong of 5 lines")


def test_a_check_that_hangs_is_one_line_and_ends_the_examination(monkeypatch):
    shown, report = examined(RIGHT, HANGS, RIGHT)
    assert [one.name for one in shown] == ["right", "hangs"] and report["doctor"] == WRONG
    assert shown[1].text == "did not answer in time; what follows was not run"
    assert shown[1].fix == "mend it"
    # What is slow between two checks is neither of them.
    with monkeypatch.context() as patch:
        patch.setattr(examination, "START_SECONDS", 0.1)

        def slow(facts):
            yield RIGHT
            time.sleep(1)
            yield RIGHT

        _, late = (
            Finding(**one) for one in examine(Mock(), Mock(), seconds=9, plan=slow)["findings"]
        )
    assert (late.name, late.fix) == ("the next check", "")
    # What the doctor's own time cuts short is not called wrong.
    (cut,), report = examined(HANGS, seconds=0.1)
    assert cut.verdict == report["doctor"] == SLOW and "time was over" in cut.text


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("9.15.0.57", None),
        ("9.1.0.70", "nvidia-cudnn-cu13 is 9.1.0.70, and jax-cuda13-plugin wants <10.0,>=9.12"),
    ],
)
def test_a_wrong_cudnn_or_no_plugin_is_found_in_the_wheels(tmp_path, monkeypatch, version, text):
    for name, has in {"jax-cuda13-plugin": "0.12.0.1", "nvidia-cudnn-cu13": version}.items():
        folder = tmp_path / f"{name.replace('-', '_')}-{has}.dist-info"
        folder.mkdir()
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {has}"]
        if "plugin" in name:
            marker = 'sys_platform == "linux" and extra == "with-cuda"'
            lines.append(f"Requires-Dist: nvidia-cudnn-cu13<10.0,>=9.12; {marker}")
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = host.packages(gpus=1)
    assert found.measured["jax"] and found.measured["optax"]
    assert found.verdict == (WRONG if text else OK) and (text or "cudnn") in found.text
    monkeypatch.setattr(host, "PLUGINS", ())  # none is there
    assert [host.packages(gpus=count).verdict for count in (2, 0)] == [WRONG, OK]


def test_a_driver_that_is_broken_or_whose_gpu_is_taken_is_found(tmp_path, monkeypatch):
    path, gpu = tmp_path / "nvidia-smi", "echo 'NVIDIA H200, 580.95.05, 143771, "
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for script, verdict, text in (
        (f"{gpu}4'; {gpu}4'", OK, "2 x NVIDIA H200, driver 580.95.05"),
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", WRONG, "ends with 9: NVIDIA-SMI has failed"),
        ("echo 'No devices were found'", WRONG, "ends with 0: No devices were found"),
        (f"{gpu}99999'", SLOW, "98 GiB of GPU 0 are in use"),
    ):
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        found = host.driver()
        assert found.verdict == verdict and text in found.text


def test_a_slow_disk_and_one_with_no_room_are_found(tmp_path, monkeypatch):
    assert host.disk(str(tmp_path), 0.01).measured["bytes_per_second"] > 0
    monkeypatch.setattr(host, "LEAST_DISK", 1 << 60)
    assert host.disk(str(tmp_path), 0.01).verdict == WRONG
    monkeypatch.setattr(host, "LEAST_DISK", 0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: time.sleep(0.15))
    found = host.disk(str(tmp_path), 0.3)
    assert found.verdict == SLOW and "under 100 MB/s" in found.text
    assert list(tmp_path.iterdir()) == []


def test_what_is_busy_or_far_below_its_datasheet_is_slow_and_so_is_a_link():
    for load, free, verdict in ((1, 1, WRONG), (1, 3, SLOW), (5, 20, SLOW), (1, 20, OK)):
        assert host.check_machine(2, load, 25 << 30, free << 30).verdict == verdict
    for copies, products, verdicts in (
        (4.1e12, 7e14, [OK, OK]), (2.0e12, 7e14, [SLOW, OK]), (4.1e12, 3e14, [OK, SLOW]),
    ):  # fmt: skip
        found = devices.check_speed("device 0", H200, copies, products, "bfloat16")
        assert [one.verdict for one in found] == verdicts
    for rate, wrong, verdict in ((3e11, False, OK), (1e10, False, SLOW), (3e11, True, WRONG)):
        assert devices.check_between(8, H200, rate, wrong=wrong).verdict == verdict


def test_free_memory_is_what_the_control_group_leaves_and_a_benchmark_takes_a_share(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("lrkv_jax.distributed.hardware.CONTROL_GROUP", tmp_path)
    cached = f"anon 5\ninactive_file {1 << 18}\n"
    for limit, free, stat in (
        (1 << 20, 3 << 18, None), (1 << 20, 1 << 20, cached), ("max", None, cached),
    ):  # fmt: skip
        (tmp_path / "memory.max").write_text(str(limit))
        (tmp_path / "memory.current").write_text(str(1 << 18))
        if stat:
            (tmp_path / "memory.stat").write_text(stat)
        measured = host.machine().measured
        assert (measured["total_bytes"], measured["free_bytes"]) == (limit, free) or not free
        assert clock.memory_limit() == pytest.approx(0.6 * measured["free_bytes"], rel=0.1)


def test_a_device_is_given_no_more_than_it_has_free(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    full = Mock(memory_stats=lambda: {"bytes_limit": 100, "bytes_in_use": 100})
    monkeypatch.setattr("jax.devices", lambda: [full])
    free = Mock(memory_stats=lambda: {"bytes_limit": 100, "bytes_in_use": 0})
    assert (clock.memory_limit(), clock.memory_limit(free)) == (0, 80)


def test_gpus_that_jax_does_not_see_are_wrong(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    found = devices.devices(gpus=1)
    assert found.verdict == WRONG and "the driver shows 1 GPUs" in found.text
    assert devices.devices(gpus=0).verdict == OK
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert devices.devices(gpus=1).verdict == OK


@pytest.mark.slow
def test_sums_over_devices_are_measured_and_one_that_loses_a_device_is_found(monkeypatch):
    found = devices.between()
    assert found.verdict == OK and found.measured["bytes_per_second"] > 0
    add = devices._sum_over_devices
    monkeypatch.setattr(
        devices, "_sum_over_devices", lambda mesh, x_NX: add(mesh, x_NX.at[3].set(0))
    )
    assert devices.between().verdict == WRONG


@pytest.mark.timed
def test_this_machine_is_right_for_the_work(tmp_path):
    base = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}
    base = {k: v for k, v in base.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-m", "lrkv_jax.cli", "doctor", "--json", "--seconds", "300"],
        cwd=tmp_path, capture_output=True, text=True, env=base | {"LRKV_COMPILATION_CACHE": "off"},
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["doctor"] != "wrong"
    assert list(tmp_path.iterdir()) == []
    lines = [line for line in done.stderr.splitlines() if not line.startswith("lrkv: ")]
    assert len(lines) == len(report["findings"])
    assert report["versions"]["jax"] and report["date"] and report["device"]
    lines = {finding["name"]: finding for finding in report["findings"]}
    assert lines["device 0: copies"]["measured"]["bytes_per_second"] > 0
