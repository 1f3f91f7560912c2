"""Checkpoints are kept, read, listed and verified; tests/faults/test_elastic.py: on any mesh."""

import json
import os
import shutil
from unittest.mock import Mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp
from support.command import lrkv

from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import Checkpointer, layout
from lrkv_jax.training.checkpointing.checkpointer import read_verified
from lrkv_jax.training.checkpointing.fingerprint import as_hex, fingerprints
from lrkv_jax.training.checkpointing.inspect import entries, verify

ONE_DEVICE = SingleDeviceSharding(jax.devices()[0])

SMALL = {"params": {"w": jnp.arange(6.0).reshape(2, 3)}, "run": {"step": jnp.int32(1)}}
ABSTRACT = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), SMALL
)


def test_the_newest_and_the_best_are_kept(tmp_path, monkeypatch):
    """A validation loss of NaN, once the first of those kept, stayed the best for ever."""
    monkeypatch.setenv("LRKV_FAILURES", str(tmp_path / "failures"))
    (tmp_path / "failures").touch()
    losses = [float("nan"), 1.0, 3.0, 2.5, None]
    with Checkpointer(tmp_path / "c", max_to_keep=2) as checkpoints:
        for step, loss in enumerate(losses, 1):
            checkpoints.save(step, SMALL, {}, loss)
            checkpoints.wait()
        assert checkpoints.steps() == [2, 4, 5]
        assert checkpoints.best() == 2
        # A loss of two batches says nothing about one of twenty.
        config = {"train": {"validation_batches": 20}}
        checkpoints.save(6, SMALL, {"config": config}, 2.0)
        checkpoints.wait()
        assert checkpoints.best() == 6 and checkpoints.steps() == [5, 6]
        # Nor does one of another text, which --allow-change data.source lets through.
        about = {"config": config, "loader": {"sources": "another", "tokenizer": "the same"}}
        for step, loss in ((7, 3.0), (8, 3.5), (9, 3.5)):
            checkpoints.save(step, SMALL, about, loss)
            checkpoints.wait()
        assert checkpoints.best() == 7 and checkpoints.steps() == [7, 8, 9]
    assert not (tmp_path / "failures").exists(), "launch/slurm.sbatch counts on that"


def test_a_step_that_a_training_run_deletes_meanwhile_is_not_damage(tmp_path, monkeypatch):
    with Checkpointer(tmp_path / "c", warn=pytest.fail) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, SMALL, {})
        checkpoints.wait()

        def late(path, abstract, processes):
            if path.name == "2":
                layout.delete(path)
            return read_verified(path, abstract, processes)

        monkeypatch.setattr("lrkv_jax.training.checkpointing.checkpointer.read_verified", late)
        assert checkpoints.restore_newest(ABSTRACT)[0] == 1


def test_a_reader_changes_nothing_and_the_trainer_tidies_up(tmp_path):
    """A reader removed what a live trainer was writing, and the trainer's save failed."""
    directory, said = tmp_path / "c", []
    with Checkpointer(directory, warn=said.append) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, SMALL, {})
        checkpoints.wait()
        layout.saving(directory, 3).mkdir()
        (directory / "2" / layout.MANIFEST).unlink()
        there = sorted(directory.rglob("*"))
        assert checkpoints.restore(ABSTRACT)[0] == 1
        assert sorted(directory.rglob("*")) == there and said.pop().endswith("; passed over")
        assert checkpoints.restore_newest(ABSTRACT)[0] == 1
        assert sorted(os.listdir(directory)) == ["1", "damaged"] and "set aside as" in said.pop()


def test_a_save_that_orbax_could_not_read_has_failed(tmp_path):
    with Checkpointer(tmp_path / "a[1]", warn=lambda text: None) as checkpoints:
        checkpoints.save(1, SMALL, {})
    assert checkpoints.failures == 1 and checkpoints.steps() == []


def test_what_a_failed_save_goes_on_writing_is_removed(tmp_path, monkeypatch):
    """On a full disk, Orbax's threads write on when the save has failed; it was left there."""
    full = Mock(side_effect=OSError(28, "No space left on device"))
    directory, save = tmp_path / "c", ocp.save_checkpointables_async
    late = directory / ".saving-1.orbax-checkpoint-tmp" / "params"
    with Checkpointer(directory, warn=lambda text: None) as checkpoints:
        monkeypatch.setattr(ocp, "save_checkpointables_async", full)
        checkpoints.save(1, SMALL, {})
        late.mkdir(parents=True)
        monkeypatch.setattr(ocp, "save_checkpointables_async", save)
        checkpoints.save(2, SMALL, {})
        checkpoints.wait()
        assert os.listdir(directory) == ["2"]
        late.mkdir(parents=True)
    assert os.listdir(directory) == ["2"] and checkpoints.failures == 1


def test_one_item_is_read_alone_and_what_is_not_there_or_is_another_model_s_is_one_line(tmp_path):
    other = jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=ONE_DEVICE)
    with Checkpointer(tmp_path / "c") as checkpoints:
        with pytest.raises(LrkvError, match="no checkpoint under"):
            checkpoints.restore({})
        checkpoints.save(4, SMALL, {})
        checkpoints.wait()
        _, restored = checkpoints.restore({"params": ABSTRACT["params"]})
        chex.assert_trees_all_equal(restored, {"params": SMALL["params"]})
        with pytest.raises(LrkvError, match="no checkpoint of step 3 in .*: there are 4"):
            checkpoints.restore({}, 3)
        for wanted, said in (
            ({**ABSTRACT["params"], "other": other}, "it has no params/other"),
            ({"w": other}, r"params/w is float32 \[2, 3\] there and float32 \[4, 3\] here"),
            # Of an optimizer with fewer counts, which was called damaged.
            ({}, "it has params/w as well"),
        ):
            with pytest.raises(LrkvError, match=rf"^.+ cannot be read as this model: {said}\Z"):
                checkpoints.restore({"params": wanted})
        layout.set_aside(tmp_path / "c/4")
        with pytest.raises(LrkvError, match="set aside before: 4"):
            checkpoints.restore_newest({})  # nothing starts from scratch there
    (tmp_path / "scratch").symlink_to("/not/mounted")  # nor there
    with pytest.raises(LrkvError, match="mount that, or delete the link"):
        Checkpointer(tmp_path / "scratch").restore_newest({})


def of(x) -> str:
    return as_hex(fingerprints([jnp.asarray(x)]))[0]


def mix(x):
    """MurmurHash3's finaliser in Python's integers."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x ^ (x >> 16)


def by_hand(values) -> str:
    """The two sums of an array of 32 bits, in Python's integers."""
    mixed = [mix(int(v) ^ i * 0x9E3779B1 % 2**32) for i, v in enumerate(np.ravel(values))]
    second = [(m ^ (m >> 15)) * (m | 1) % 2**32 for m in mixed]
    return f"{sum(mixed) % 2**32:08x}{sum(second) % 2**32:08x}"


def test_it_is_the_sums_that_the_module_describes():
    values = np.random.default_rng(0).integers(0, 2**32, (3, 5, 7), np.uint32)
    assert of(values) == by_hand(values)
    assert of(values.view(np.float32)) == by_hand(values), "a float is its bits"
    assert of(np.zeros((0, 3), np.float32)) == by_hand([]), "LRKV of rank 0 has empty residuals"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "bool"])
def test_no_sharding_changes_it(dtype):
    values = np.random.default_rng(1).normal(size=(8, 4, 6)) * 50
    x = jnp.asarray(values > 0 if dtype == "bool" else values).astype(dtype)
    expected = of(x)
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    for spec in (P("a"), P("b", "a")):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        assert as_hex(fingerprints([placed])) == [expected], spec


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    with Checkpointer(run / "checkpoints", max_to_keep=9) as checkpoints:
        for step, loss in ((1, np.nan), (2, 1.0), (3, 2.0), (4, None)):
            items = {"params": {"w": jnp.full((30, 5), step / 7)}, "run": {"step": jnp.int32(step)}}
            checkpoints.save(step, items, {"tokens": 100 * step}, loss)
            checkpoints.wait()
    return run


@pytest.fixture
def run(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def test_a_step_that_is_deleted_while_it_is_looked_at_is_not_damaged(run, monkeypatch):
    """`list` and `verify` said DAMAGED while a training run deleted old steps."""
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
    # Of a loss that is no number, which not every reader of JSON takes.
    assert [row["validation_loss"] for row in rows] == [None, 1.0, 2.0, None]
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
