"""The GPU's first day: stages that resume, end in time and fail alone, and the pages' tables."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "experiments" / "first_light.py"


@pytest.fixture
def light(monkeypatch, tmp_path):
    """The script, with the stages of `support.planted_items`, and copies of the pages."""
    for page in ("decode.md", "planning.md"):
        shutil.copy(ROOT / "docs" / page, tmp_path / page)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("first_light", SCRIPT)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    monkeypatch.setattr(module, "PROGRAM", ROOT / "tests" / "support" / "planted_items.py")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "experiments"))
    monkeypatch.setenv("LIGHT_LOG", str(tmp_path / "log"))
    (tmp_path / "log").touch()
    monkeypatch.setenv("LIGHT_PLACE", "a device")

    def measure(items, seconds=60, dry=False):
        """Measure these items, and give what is amiss."""
        monkeypatch.setenv("LIGHT_ITEMS", items)
        return module.run(module.Stage("decoding", tmp_path, dry), seconds)

    module.measure = measure
    return module


def test_what_hangs_crashes_or_raises_is_a_row_and_the_next_item_runs(light, tmp_path):
    amiss = [
        "decoding: hangs: did not answer within 0 s (last begun: a kernel)",
        "decoding: crashes: ended with 3",
        "decoding: raises: ValueError: no such kernel",
    ]
    assert light.measure("1 hangs 2 crashes raises 3") == amiss
    content = json.loads((tmp_path / "decoding.json").read_text())
    names = [row["name"] for row in content["rows"]]
    assert names == ["1", "hangs", "2", "crashes", "raises", "3"]
    assert content["where"]["device"] == "a device" and content["rows"][0]["date"].endswith("Z")
    # What is missing is measured again, in time, and nothing else.
    left_out = "decoding: left out: long, and what follows it"
    assert light.measure("1 2 3 4 long 5", 4.0) == [*amiss, left_out]
    assert light.measure("1 2 3 4 5") == amiss
    assert (tmp_path / "log").read_text() == "12345"
    stage = light.Stage("decoding", tmp_path, False)
    hung = f"a {light.HUNG} within 90 s; 20 right"
    stage.record({"name": "a group", "verdict": "wrong", "text": hung})
    assert "a group" in stage.done()


def test_of_a_group_of_tests_those_that_ended_in_time_are_kept(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    stages = importlib.import_module("first_light_stages")
    monkeypatch.setattr(stages.signal, "getitimer", lambda which: (3.5, 0.0))
    monkeypatch.setattr(stages.os, "sched_getaffinity", lambda process: {0})

    def quick(*arguments, seconds):
        if arguments[-1] != "a[1]":
            time.sleep(seconds)
            raise subprocess.TimeoutExpired("pytest", seconds)
        return subprocess.CompletedProcess((), 0, "1 passed")

    monkeypatch.setattr(stages, "_pytest", quick)
    found = stages._tests("128m", ["a[1]", "a[2]", "a[3]"], "gpu")
    assert list(found.measured["tests"].values()) == ["ok", *["had no time"] * 2]
    assert found.verdict == "wrong" and found.text == "2 had no time; 3 had no time; 1 right"


def test_decoding_goes_on_without_our_kernel_behind_a_shape_that_hung(tmp_path, monkeypatch):
    """Shapes keep their names, so that none that is there is measured again."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    stages = importlib.import_module("first_light_stages")
    before = list(stages.decoding(tmp_path, dry=False))
    (tmp_path / "decoding.json").write_text(f"{stages.HUNG} within 110 s")
    after = list(stages.decoding(tmp_path, dry=False))
    assert [item.name for item in after] == [item.name for item in before]
    ours = ["mosaic" in item.measure.args[1]["implementations"] for item in (before[0], after[0])]
    assert ours == [True, False]


def test_rows_of_another_device_or_of_a_dry_run_are_not_mixed(light, tmp_path, monkeypatch):
    assert light.measure("1") == []
    before = (tmp_path / "decoding.json").read_text()
    (line,) = light.measure("2", dry=True)
    assert "decoding.json is of a device: " in line
    monkeypatch.setenv("LIGHT_PLACE", "another device")
    (line,) = light.measure("2")
    assert "decoding.json is of another place (device: a device)" in line
    assert (tmp_path / "decoding.json").read_text() == before
    monkeypatch.setenv("LIGHT_PLACE", "nowhere")
    assert light.measure("2") == ["decoding: ended with 3"]  # its process does not start
    assert (tmp_path / "log").read_text() == "1"


def block(page, name):
    text = page.read_text()
    return text.partition(f"<!-- first light: {name} -->")[2].partition("<!-- end of")[0].strip()


def test_tables_are_of_the_files_that_have_measurements(light, tmp_path):
    def plant(name, *rows, dry=False):
        where = {"device": "NVIDIA H200", "versions": {"jax": "0.11.2", "torch": "2.11.0"}}
        content = {"stage": name, "dry": dry, "where": where, "left_out": [], "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))

    def row(name, verdict, *lines):
        return {"name": name, "verdict": verdict, "text": "it was so", "measured": {},
                "cells": lines, "date": "2026-12-01T08:00:00Z"}  # fmt: skip

    # A dry run, and a stage without a row, take nothing from a page.
    plant("kernels", row("t1", "ok"), dry=True)
    plant("training")
    light.write_tables(tmp_path, tmp_path)
    for page in ("decode.md", "planning.md"):
        assert (tmp_path / page).read_text() == (ROOT / "docs" / page).read_text()
    light.write_tables(ROOT / "experiments" / "results" / "h200", tmp_path)
    for page, name in (("decode.md", "decoding"), ("planning.md", "training")):
        assert block(tmp_path / page, name) == block(ROOT / "docs" / page, name)
    plant("kernels", row("t1", "ok"), row("t2", "wrong"))
    line = ["128m", "120.0 (SDPA)", "lrkv full", "mosaic", "60.0", "0.50", "0.50", "80%"]
    plant("decoding", row("128m", "ok", line), row("hung", "wrong"))
    light.write_tables(tmp_path, tmp_path)
    decoding = block(tmp_path / "decode.md", "decoding")
    assert decoding.count("(NVIDIA H200, jax 0.11.2, torch 2.11.0, 2026-12-01.)") == 2
    assert f"| {' | '.join(line)} |" in decoding and "1 right, 1 wrong, 0 not run." in decoding
    assert "- t2: it was so" in decoding and "- hung: it was so" in decoding


@pytest.mark.slow
def test_a_dry_run_executes_every_stage(light, tmp_path):
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--dry", "--out", out, "--docs", tmp_path],
        env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("kernels", "decoding", "training", "runs"):
        content = json.loads((out / f"{name}.json").read_text())
        assert content["rows"] and content["where"]["versions"]["jax"] and not content["left_out"]
        assert {row["verdict"] for row in content["rows"]} == {"ok"}
    assert (tmp_path / "decode.md").read_text() == (ROOT / "docs/decode.md").read_text()
