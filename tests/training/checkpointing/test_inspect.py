"""What a run has saved can be listed and verified."""

import json
import shutil

import jax.numpy as jnp
import pytest
from support.command import lrkv

from lrkv_jax.training.checkpointing import Checkpointer, layout
from lrkv_jax.training.checkpointing.inspect import entries, verify


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    with Checkpointer(run / "checkpoints", max_to_keep=9) as checkpoints:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None)):
            items = {"params": {"w": jnp.full((30, 5), step / 7)}, "run": {"step": jnp.int32(step)}}
            checkpoints.save(step, items, {"tokens": 100 * step}, loss)
            checkpoints.wait()
    return run


@pytest.fixture
def run(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def test_a_step_that_is_deleted_while_it_is_looked_at_is_not_damaged(run, monkeypatch):
    """A21: `list` and `verify` said DAMAGED while a training run deleted old steps."""
    first, *_ = entries(run)
    layout.delete(first.path)
    layout.delete(first.path)  # nor is it an error that another has deleted it
    assert verify(first) is None
    read = layout.read_manifest

    def late(path):
        if path.name == "2":
            layout.delete(path)
        return read(path)

    monkeypatch.setattr("lrkv_jax.training.checkpointing.layout.read_manifest", late)
    assert [(e.step, e.damage) for e in entries(run)] == [(3, None), (4, None)]


def test_list_and_verify_say_what_is_there(run, monkeypatch, capsys):
    code, out, _ = lrkv(capsys, monkeypatch, "checkpoint", "list", run, "--json")
    rows = json.loads(out)
    assert code == 0 and [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["best"] for row in rows] == [False, True, False, False]
    assert [row["tokens"] for row in rows] == [100, 200, 300, 400]
    assert all(row["bytes"] > 600 and row["damage"] is None for row in rows)
    code, out, _ = lrkv(capsys, monkeypatch, "checkpoint", "verify", run)
    assert code == 0 and out.count("sound") == 4 and "best" in out
    # A byte that the list cannot see.
    files = [p for p in (run / "checkpoints/3/params").rglob("*") if p.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert lrkv(capsys, monkeypatch, "checkpoint", "list", run)[0] == 0
    code, out, _ = lrkv(capsys, monkeypatch, "checkpoint", "verify", run, "--json")
    assert code == 2
    damaged = {row["step"]: row["damage"] for row in json.loads(out) if row["damage"]}
    assert set(damaged) == {3}
    assert path.name in damaged[3] and "is not as it was written" in damaged[3]
    assert lrkv(capsys, monkeypatch, "checkpoint", "verify", run, "--step", "4")[0] == 0
    for verb in ("list", "verify"):
        code, _, err = lrkv(capsys, monkeypatch, "checkpoint", verb, run / "checkpoints/1")
        assert code == 2 and "has no checkpoints: give a run's directory" in err


def test_a_time_limit_that_is_none_is_refused(monkeypatch, capsys):
    for limit in ("1", "0:00", "1:2:3:4", "-1:00", "²:00"):
        code, _, err = lrkv(capsys, monkeypatch, "train", "quickstart", "--time-limit", limit)
        assert code == 2 and ("write HH:MM:SS" in err or "No such option" in err)
