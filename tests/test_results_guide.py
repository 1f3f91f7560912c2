"""What docs/results.md shows is what the runs left: its tables, its pictures, its commands."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from lrkv_jax.sweep import grid

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "results.md"
KEPT = ROOT / "experiments" / "results" / "nano"


def test_every_row_of_a_table_is_in_a_file_that_a_script_wrote():
    written = {line for path in KEPT.glob("*.md") for line in path.read_text().splitlines()}
    shown = GUIDE.read_text().split("## What holds")[0]  # what follows is read, not written
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(rows) > 25
    assert [row for row in rows if row not in written] == []


def test_every_picture_is_there():
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", GUIDE.read_text())
    assert len(pictures) > 5 and all((GUIDE.parent / path).is_file() for path in pictures)


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


def test_its_sweeps_are_the_runs_that_it_tells_of():
    commands = re.findall(r"^lrkv sweep (.*) --jobs 2$", GUIDE.read_text(), re.M)
    points = [point for command in commands for point in grid(*_split(command.split()))]
    assert len(points) == 33
    labels = {(point.config.attention, point.config.train.seed) for point in points}
    assert len(labels) == 33


def _split(words):
    return words[0], words[1:]
