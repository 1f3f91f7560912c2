"""docs/paper.md names every artefact, and docs/results.md shows what the runs gave."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.paper_cases import artefact

from lrkv_jax.comparison import read_runs
from lrkv_jax.config.differences import differences
from lrkv_jax.paper import ARTEFACTS
from lrkv_jax.sweep.grid import grid

ROOT = Path(__file__).parents[2]
PAPER = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs/results.md").read_text(encoding="utf-8")
KEPT = ROOT / "experiments/results/nano"


def test_the_guide_to_the_paper_names_tests_and_every_artefact():
    assert len(set(re.findall(r"`(test_\w+)`", PAPER))) > 30  # test_docs.py: they exist
    assert [one.name for one in ARTEFACTS if f"`{one.name}`" not in PAPER] == []


def test_every_row_of_the_results_is_in_a_file_that_the_report_wrote():
    written = {line for path in KEPT.glob("*.md") for line in path.read_text().splitlines()}
    shown = RESULTS.split("## What holds")[0]  # what follows is read, not written
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(rows) > 25
    assert [row for row in rows if row not in written] == []


@pytest.mark.parametrize("name", ["table01_pretraining", "table08_rank_ablation"])
def test_means_and_spreads_are_those_of_the_seeds_beside_them(name):
    table = json.loads((KEPT / f"{name}.json").read_text())
    column = [each["name"] for each in table["columns"]].index("BPB")
    for row in table["rows"]:
        cell = row["cells"][column]
        seeds = list(cell["seeds"].values())
        assert sorted(cell["seeds"]) == ["0", "1", "2"]
        assert [cell["value"], cell["sd"]] == pytest.approx([np.mean(seeds), np.std(seeds, ddof=1)])
        rows = (KEPT / f"{name}.md").read_text()
        assert f"{cell['value']:.4f} ± {cell['sd']:.4f}" in rows


def test_its_sweeps_are_the_runs_that_it_is_about():
    commands = re.findall(r"^lrkv sweep (.*) --jobs 2$", RESULTS, re.M)
    points = [point for words in map(str.split, commands) for point in grid(words[0], words[1:])]
    labels = {(point.config.attention, point.config.train.seed) for point in points}
    assert len(points) == len(labels) == 33


def test_the_family_s_tables_are_those_of_the_kept_runs(tmp_path):
    runs = read_runs([ROOT / "experiments/results/family/runs.jsonl"])
    for name in ("learning_rates", "family"):
        one = artefact(name)
        one.write(one.made(runs), tmp_path)
    written = [line for path in tmp_path.glob("*.md") for line in path.read_text().splitlines()]
    section = RESULTS.split("## The family, begun")[1].split("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("|")]
    assert len(shown) > 15 and [line for line in shown if line not in written] == []


def test_the_family_s_kept_runs_are_of_its_sweeps_and_name_their_processor():
    commands = re.findall(r"^lrkv sweep (configs/nano_family[^-]*)--tasks", RESULTS, re.M)
    asked = [words.replace("\\\n", " ").split() for words in commands]
    points = [point for config, *settings in asked for point in grid(config, settings)]
    by_line = {}
    for point in points:
        by_line.setdefault((point.config.attention, point.config.train.seed), []).append(point)
    runs = read_runs([ROOT / "experiments/results/family/runs.jsonl"])
    assert runs
    for run in runs:
        alike = by_line[run.variant, run.seed]
        assert run.finished and any(not differences(run.config, one.config) for one in alike)
        assert run.history[0]["device"] and run.history[0]["cores"] == 1
        assert run.evaluation["bpb"]["bits_per_byte"] == pytest.approx(run.bits_per_byte, rel=1e-6)
