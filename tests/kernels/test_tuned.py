"""Plans timed on a device are taken there, and nowhere else."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from lrkv_jax.kernels import proof
from lrkv_jax.kernels.split_kv import plan as plans
from lrkv_jax.kernels.split_kv import tuned
from lrkv_jax.kernels.split_kv.choice import find

LRKV = {"H": 18, "G": 1, "T": 1, "key_widths": (128,), "value_width": 128, "rank": 56,
        "full": True, "norm_heads": 1}  # fmt: skip
MHA = {"H": 6, "G": 6, "T": 1, "key_widths": (128,), "value_width": 128}
MLA = {"H": 6, "G": 1, "T": 8, "key_widths": (128, 64), "value_width": 128, "values_in_keys": True}
PLAN = plans.make_plan(**LRKV)


def found(shape=LRKV):
    return find("bfloat16", {}, "mosaic", slots=512, paged=False, **shape)[0]


def choice(**changes):
    return {**tuned.chosen(PLAN), **changes}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a table for this device, with changes of its fields, and name it as the one to use."""

    def written(plan, text=None, **changes):
        device = jax.local_devices()[0].device_kind
        record = {**tuned.record(device), "plans": {tuned.family(PLAN): plan}, **changes}
        path = tmp_path / "table.json"
        path.write_text(json.dumps(record) if text is None else text)
        monkeypatch.setenv(tuned.VARIABLE, str(path))
        tuned.table.cache_clear()
        tuned._checked.cache_clear()

    yield written
    tuned.table.cache_clear()


def test_a_family_runs_with_its_timed_plan_and_other_families_do_not(write):
    write(choice(heads=1, workers=28))
    assert found() == replace(PLAN, heads=1, units=9, norm_heads=1, workers=28)
    assert found(MHA) == plans.make_plan(**MHA)
    assert found({**LRKV, "full": False}) == plans.make_plan(**{**LRKV, "full": False})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "NVIDIA H100"}, "device NVIDIA H100, here cpu"),
        ({"jax": "0.1.0"}, f"jax 0.1.0, here {jax.__version__}"),
        ({"sources": "abc"}, f"sources abc, here {proof.sources()}"),
        ({"plans": [1]}, "TypeError"),
        ({"text": "{"}, "JSONDecodeError"),
        ({"text": "{}"}, "KeyError: 'device'"),
    ],
)
def test_a_table_of_another_device_version_or_source_is_ignored_and_said(
    write, caplog, changes, said
):
    write(choice(heads=1), **changes)
    with caplog.at_level(logging.WARNING):
        assert [found(), found()] == [PLAN, PLAN]
    (record,) = caplog.records
    line = record.getMessage()
    assert "table.json are ignored: " in line and said in line and "\n" not in line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ring": 20, "head_ring": 14}, "bytes of shared memory"),
        ({"heads": 4}, "8 heads per CTA do not divide 18"),
        ({"ring": 1}, "too short or too long"),
        ({"ctas": 2, "ring": 3, "head_ring": 2}, "shared memory|registers"),
        ({"ring": None}, "TypeError"),
    ],
)
def test_a_plan_that_no_longer_fits_is_ignored_and_said(write, caplog, changes, said):
    write(choice(**changes))
    with caplog.at_level(logging.WARNING):
        assert [found(), found()] == [PLAN, PLAN]
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith("the tuned plan for 18 heads, 1 groups, 1 queries, keys 128, values 128")
    assert any(part in line for part in said.split("|"))


def test_a_missing_table_that_was_named_is_said_and_one_that_was_not_is_not(
    monkeypatch, tmp_path, caplog
):
    with caplog.at_level(logging.WARNING):
        tuned.table.cache_clear()
        assert found() == PLAN and not caplog.records
        monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "none.json"))
        tuned.table.cache_clear()
        assert found() == PLAN
    assert "none.json are ignored: FileNotFoundError" in caplog.text
    tuned.table.cache_clear()


def test_all_processes_of_a_run_take_the_first_ones_table(write, monkeypatch, tmp_path):
    write(choice(heads=3))
    kept = {}
    client = SimpleNamespace(
        key_value_set=lambda key, value, allow_overwrite: kept.update({key: value}),
        blocking_key_value_get=lambda key, milliseconds: kept[key],
    )
    monkeypatch.setattr(tuned.distributed, "global_state", SimpleNamespace(client=client))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    first = tuned.table()
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.delenv(tuned.VARIABLE)  # its own disk has none
    tuned.table.cache_clear()
    assert tuned.table() == first and len(first) == 1
    # The first one's file is missing: the others learn that too, and do not wait.
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "none.json"))
    tuned.table.cache_clear()
    assert tuned.table() == {} and kept == {"lrkv/kernels/tuned": '""'}


@pytest.mark.parametrize("shape", [LRKV, {**LRKV, "full": False}, MHA, MLA, {**LRKV, "T": 8}])
def test_computed_plans_fit_and_come_back_from_what_a_table_says_of_them(shape):
    for plan in plans.splits(**shape):
        assert plans.unfit(plan) is None
        assert tuned.with_choice(PLAN if shape == LRKV else plan, tuned.chosen(plan)) == plan
