"""docs/paper.md names every table and figure, and docs/results.md shows what the runs gave."""

import json
import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

from lrkv_jax.lab.report.paper import REPORT_ITEMS
from lrkv_jax.lab.sweep.grid import grid

ROOT = Path(__file__).parents[4]
PAPER = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs/results.md").read_text(encoding="utf-8")
KEPT = ROOT / "experiments/results"


def test_the_guide_to_the_paper_names_tests_and_every_table_and_figure():
    assert len(set(re.findall(r"`(test_\w+)`", PAPER))) > 30  # test_docs.py: they exist
    assert [one.name for one in REPORT_ITEMS if f"`{one.name}`" not in PAPER] == []


def test_means_and_spreads_are_those_of_the_seeds_beside_them():
    for name, title, seeds in (
        ("nano/table08_rank_ablation", "BPB", ["0", "1", "2"]),
        ("family/family", "held-out text", None),
    ):  # fmt: skip
        table = json.loads((KEPT / f"{name}.json").read_text())
        names = [each["name"] for each in table["columns"]]
        for row in table["rows"]:
            cell = row["cells"][names.index(title)]
            each = list(cell["seeds"].values())
            if seeds is None:
                assert len(each) == row["cells"][names.index("seeds")]["value"]
            else:
                assert sorted(cell["seeds"]) == seeds
            moments = [np.mean(each), np.std(each, ddof=1)]
            assert [cell["value"], cell["sd"]] == pytest.approx(moments)
            assert f"{cell['value']:.4f} ± {cell['sd']:.4f}" in RESULTS


def test_lrkv_full_has_a_lower_loss_than_mha_with_less_diverse_heads():
    """Against the paper's mechanism: by what text shows of the heads, at three seeds."""

    def column(name, place):
        rows = json.loads((KEPT / f"family/{name}.json").read_text())["rows"]
        return {
            row["cells"][0]["value"]: row["cells"][place]["value"]
            for row in rows
            if "value" not in row["block"]  # query–key forms alone
        }

    bits = column("family", 5)
    diversity, cosine = (column("heads/weighted_ranks", place) for place in (5, 7))
    full, mha = "LRKV-8", "MHA"
    assert bits[full] < bits[mha]
    assert diversity[full] < diversity[mha] and cosine[full] > cosine[mha]
    for value in (diversity[full], diversity[mha]):
        assert f"{value:.1f}" in PAPER and f"{value:.1f}" in RESULTS


def test_its_sweeps_are_the_runs_that_it_is_about():
    commands = re.findall(r"^lrkv sweep (configs/nano(?:_ranks|_latents)?.yaml .*)$", RESULTS, re.M)
    points = [point for words in map(str.split, commands) for point in grid(words[0], words[1:])]
    labels = {(point.config.attention, point.config.train.seed) for point in points}
    assert len(points) == len(labels) == 33


def test_the_family_s_pages_are_what_the_archive_and_the_benchmark_give(tmp_path, monkeypatch):
    """One command writes their tables, JSON and pictures again, and nothing changes."""
    docs, results = tmp_path / "docs", tmp_path / "results"
    for folder in ("family", "nano"):
        shutil.copytree(ROOT / "experiments/results" / folder, results / folder)
    shutil.copy(ROOT / "experiments/results/decode_cpu-family.json", results)
    docs.mkdir()
    for page in ("results.md", "choosing.md"):
        shutil.copy(ROOT / "docs" / page, docs)
    monkeypatch.setattr("sys.argv", ["", "--docs", str(docs), "--results", str(results)])
    runpy.run_path(str(ROOT / "experiments/family_pages.py"), run_name="__main__")
    for page in ("results.md", "choosing.md"):
        assert (docs / page).read_text() == (ROOT / "docs" / page).read_text()
    for path in (ROOT / "experiments/results/family").glob("*.json"):
        assert (results / "family" / path.name).read_bytes() == path.read_bytes()
