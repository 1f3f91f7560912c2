"""Devices that are slow, or garble what they send, are found."""

import pytest

from lrkv_jax.distributed.hardware import hardware
from lrkv_jax.lab.doctor import devices
from lrkv_jax.lab.doctor.finding import OK, SLOW, WRONG

H200 = hardware("h200")
RATES = {"bfloat16": 7e14, "float32": 4e13}


@pytest.mark.parametrize(
    ("copies", "rates", "verdicts"),
    [
        (4.1e12, RATES, [OK, OK]),
        (2.0e12, RATES, [SLOW, OK]),
        (4.1e12, RATES | {"bfloat16": 3e14}, [OK, SLOW]),
    ],
)
def test_a_device_far_below_its_datasheet_is_slow(copies, rates, verdicts):
    found = devices.check_speed("device 0", H200, copies, rates, "bfloat16")
    assert [one.verdict for one in found] == verdicts
    assert "% of the datasheet's" in found[0].says and found[0].measured["bytes_per_second"]


def test_links_that_are_slow_or_garble_are_found():
    check = devices.check_between
    assert check(8, H200, {4: 3e11}, wrong=False).verdict == OK
    assert check(8, H200, {4: 1e10}, wrong=False).verdict == SLOW
    assert check(8, H200, {4: 3e11}, wrong=True).verdict == WRONG


def test_gpus_that_jax_does_not_see_are_wrong(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    found = devices.devices(gpus=1)
    assert found.verdict == WRONG and "JAX computes on the CPU" in found.says
    assert devices.devices(gpus=0).verdict == OK
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    found = devices.devices(gpus=0)
    assert found.verdict == WRONG and "JAX_PLATFORMS is cuda" in found.says
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert devices.devices(gpus=1).verdict == OK


@pytest.mark.slow
def test_sums_over_devices_are_measured_and_one_that_loses_a_device_is_found(monkeypatch):
    found = devices.between()
    assert found.verdict == OK and len(found.measured["bytes_per_second"]) == 2
    add = devices._sum_over_devices
    monkeypatch.setattr(
        devices, "_sum_over_devices", lambda mesh, x_NX: add(mesh, x_NX.at[3].set(0))
    )
    assert devices.between().verdict == WRONG
