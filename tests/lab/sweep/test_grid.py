"""A sweep's settings stand for the runs that they say, and each run is known for what it is."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lrkv_jax.config import dump_config, load_config
from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.benchmark import BenchmarkSettings
from lrkv_jax.lab.sweep.grid import grid
from lrkv_jax.lab.sweep.work import state_of

NANO = "configs/nano.yaml"


def test_every_combination_is_a_run_of_its_own():
    points = grid(NANO, ["attention=mha,lrkv", "train.steps=10", "seed=0,7"], "out")
    assert [p.name for p in points] == ["mha-seed0", "mha-seed7", "lrkv-seed0", "lrkv-seed7"]
    assert [str(p.directory) for p in points] == [f"out/{p.name}" for p in points]
    for point in points:
        run = point.config
        seeds = {run.train.seed, run.data.shuffle_seed}
        assert seeds == {int(point.name[-1])} and run.train.steps == 10
        assert run == load_config(point.arguments[0], point.arguments[1:])
    points = grid(NANO, ["attention=lrkv", "attention.rank=2,32", "optimizer.grad_clip=0.5"])
    assert [p.config.model.attention.rank for p in points] == [2, 32]
    assert str(points[0].directory) == "runs/nano/lrkv-rank2"
    # Commas in brackets and quotes belong to a value; an apostrophe within a word opens none.
    first, second = grid(NANO, ['train.sample_prompts=["a, b", c],[d]'])
    assert [point.config.name for point in grid(NANO, ["name=it's,that's"])] == ["it's", "that's"]
    assert first.config.train.sample_prompts == ("a, b", "c")
    assert second.config.train.sample_prompts == ("d",)
    assert "/" not in first.name and first.name != second.name
    ablation = grid("nano_ranks", ["attention=all"])
    assert [p.config.model.attention.rank for p in ablation] == [2, 4, 8, 16, 32]


def test_what_cannot_be_is_said_before_anything_starts():
    for settings, said in (
        (["attention"], "is not a setting"),
        (["attention= "], "is not a setting"),
        (["attention=mha,[lrkv"], "is not YAML"),
        (["attention=mha,mha"], "repeats itself"),
        (["seed=0", "seed=1"], "repeats itself"),
        (["seed=0", "train.seed=1,2"], "seed sets train.seed too"),
        (["run_dir=x,y"], "--out FOLDER"),
        (["attention=mha,lrkv", "attention.rank=2,4"], "unknown key attention.rank"),
    ):
        with pytest.raises(LrkvError, match=said) as error:
            grid(NANO, settings)
        assert "\n" not in str(error.value)


def leave(point, *, step, evaluated=None, config=None):
    """What a run leaves in its directory."""
    point.directory.mkdir(parents=True, exist_ok=True)
    (point.directory / "config.yaml").write_text(dump_config(config or point.config))
    rows = "".join(json.dumps({"step": s}) + "\n" for s in range(1, step + 1))
    (point.directory / "metrics.jsonl").write_text(rows)
    if evaluated is not None:
        report = {"step": evaluated, "bpb": {"bits_per_byte": 2.0}}
        (point.directory / "evaluation.json").write_text(json.dumps(report))


def test_a_run_is_done_when_its_last_step_was_evaluated_on_all_that_was_asked(tmp_path):
    points = grid(NANO, ["attention=mha,gqa,mqa,mla", "train.steps=5"], str(tmp_path))
    leave(points[1], step=3)
    leave(points[2], step=5, evaluated=4)
    leave(points[3], step=5, evaluated=5)
    states = [state_of(point, ["bpb"]) for point in points]
    assert [(s.name, s.step) for s in states] == [
        ("new", 0), ("begun", 3), ("begun", 5), ("done", 5),
    ]  # fmt: skip
    assert states[3].evaluation["bpb"]["bits_per_byte"] == 2.0
    assert state_of(points[3], ["bpb", "agreement"]).name == "begun"
    usual = BenchmarkSettings().asked
    for kept, arc, done in (
        ({}, {"settings": usual}, True), ({}, {"settings": usual | {"limit": 10}}, False),
        ({"changed_settings": ["model.dtype was float32, is bfloat16"]}, {}, False),
    ):  # fmt: skip
        found = {"step": 5, **kept, "bpb": {"bits_per_byte": 2.0}, "arc_easy": arc}
        (points[3].directory / "evaluation.json").write_text(json.dumps(found))
        assert (state_of(points[3], ["bpb", "arc_easy"]).name == "done") == done
    assert str(states[3]) == "done, 2.0000 bits per byte"
    assert str(replace(states[3], evaluation={"bpb": {"bits_per_byte": None}})) == "done"
    for garbled in ("", "[]", "[" * 100_000, "{}", "\x00" * 9):  # it was a traceback
        (points[3].directory / "evaluation.json").write_text(garbled)
        assert state_of(points[3], ["bpb"]).name == "begun"


def test_a_directory_of_other_settings_is_refused_and_another_rhythm_is_not(tmp_path):
    (point,) = grid(NANO, ["train.steps=5", "seed=3"], str(tmp_path))
    # Where it is saved, or what `auto` was resolved to, makes no other run.
    for same in ("train.save_every=7", "model.dtype=bfloat16"):
        leave(point, step=5, config=load_config(NANO, [*point.arguments[1:], same]))
        assert state_of(point, ["bpb"]).name == "begun"
    for other in ("train.seed=4", "optimizer.matrix_lr=0.01", "train.steps=6"):
        config = load_config(NANO, [*point.arguments[1:], other])
        Path(point.directory, "config.yaml").write_text(dump_config(config))
        with pytest.raises(LrkvError, match=other.partition("=")[0]):
            state_of(point, ["bpb"])
