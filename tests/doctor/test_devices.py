"""Devices that are slow and steps that differ are found."""

import numpy as np
import pytest

from lrkv_jax.doctor import devices, expectations, steps, versions
from lrkv_jax.doctor.finding import NOT_HERE, OK, SLOW, WRONG
from lrkv_jax.hardware import hardware

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
    assert check("all-reduce", 8, H200, {4: 3e11}, wrong=False).verdict == OK
    assert check("all-reduce", 8, H200, {4: 1e10}, wrong=False).verdict == SLOW
    assert check("all-reduce", 8, H200, {4: 3e11}, wrong=True).verdict == WRONG


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
    monkeypatch.setattr(versions, "PLUGINS", {})  # this machine may have one
    assert versions.loaded().verdict == NOT_HERE


def of_step(**changes):
    arrays = {"loss": [7.0], "moments": [np.ones(3), np.ones(2)], "changes": [np.ones(4)]}
    return {**{k: [np.asarray(a) for a in v] for k, v in arrays.items()}, **changes}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, ""),
        ({"loss": [np.array(7.001)]}, "loss differs from the CPU's by 1e-04"),
        ({"moments": [np.ones(3), np.array([1, 1.001])]}, "moments differs"),
        ({"changes": [np.array([1, 1, 1, np.nan])]}, "changes is not finite"),
    ],
)
def test_a_step_that_differs_or_is_not_finite_is_wrong(changes, says):
    found = steps.check_step("step", of_step(**changes), of_step(), steps.ALLOWED["float32"])
    assert found.verdict == (WRONG if says else OK) and says in found.says


def test_expectations_follow_from_the_rates():
    def at(copies, products):
        found = expectations.expect("quickstart", 1, 16 * 10**9, copies, products, None)
        assert [one.name for one in found][-2:] == ["expect, lrkv", "expect, lrkv_latent"]
        return found[-1].measured

    once, twice = at(1e10, 1e11), at(2e10, 2e11)
    assert once["decode"]["floor_of_one"] == pytest.approx(2 * twice["decode"]["floor_of_one"])
    assert once["time"]["step"] == pytest.approx(2 * twice["time"]["step"])
    assert once["time"]["mfu"] == pytest.approx(twice["time"]["mfu"])
    assert 0 < once["time"]["mfu"] < 0.6  # of the products, which the plan assumes to reach 0.6
    tiny = expectations.expect("quickstart", 1, 10**6, 1e10, 1e11, None)
    assert {one.verdict for one in tiny} == {SLOW}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "all-to-all"])
def test_collectives_are_measured_and_one_that_loses_a_device_is_found(kind, monkeypatch):
    found = devices.between(kind)
    assert found.verdict == OK and len(found.measured["bytes_per_second"]) == 2
    send = devices._send
    monkeypatch.setattr(devices, "_send", lambda kind, mesh, x: send(kind, mesh, x.at[3].set(0)))
    assert devices.between(kind).verdict == WRONG


@pytest.mark.slow
def test_a_step_is_the_cpus_and_one_that_attends_wrongly_is_found(monkeypatch):
    from lrkv_jax.kernels import flash
    from lrkv_jax.kernels.flash import whole

    assert steps.of_variant("lrkv").verdict == OK

    def wrong(q, k, v, **how):
        return whole.causal_attention(q, k * 1.01, v, **how)

    monkeypatch.setitem(flash._RUN, "whole", wrong)
    found = steps.of_variant("lrkv")
    assert found.verdict == WRONG and "moments differs" in found.says
