"""docs/paper.md names every table and figure, and docs/results.md shows what the runs gave."""

import json
import re
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

from lrkv_jax.lab.report.comparison.contrasts import against
from lrkv_jax.lab.report.paper import REPORT_ITEMS

ROOT = Path(__file__).parents[4]
PAPER = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs/results.md").read_text(encoding="utf-8")
KEPT = ROOT / "experiments/results"


@pytest.fixture(autouse=True)
def experiments(monkeypatch):
    """The scripts import one another as they do where they are run."""
    monkeypatch.syspath_prepend(ROOT / "experiments")


def test_the_guide_to_the_paper_names_tests_and_every_table_and_figure():
    assert len(set(re.findall(r"`(test_\w+)`", PAPER))) > 30  # test_docs.py: they exist
    assert [one.name for one in REPORT_ITEMS if f"`{one.name}`" not in PAPER] == []


def test_lrkv_full_has_a_lower_loss_than_mha_with_heads_that_are_more_alike():
    """Against the paper's mechanism, by cosines and by the paper's centered rank; of that rank
    weighted by text no difference is found."""

    def to_mha(name, place):
        rows = json.loads((KEPT / f"family/{name}.json").read_text())["rows"]
        values = {
            row["cells"][0]["value"]: row["cells"][place]["seeds"]
            for row in rows
            if "value" not in row["block"]  # query–key forms alone
        }
        return against(values.pop("MHA"), values)["LRKV-8"]

    assert to_mha("family", 5).verdict == "lower"
    cosine, rank = (to_mha("heads/weighted_ranks", place) for place in (7, 5))
    for one in (cosine, to_mha("heads/similarity_gap_table", 1)):
        assert one.verdict == "higher" and one.p < 0.001
    assert cosine.with_interval(3) in RESULTS
    assert rank.verdict == "not found" and f"differ (p = {rank.p:.2g})" in RESULTS
    plain = to_mha("heads/weighted_ranks", 4)
    assert plain.verdict == "lower" and plain.p < 0.001
    assert f"unweighted {-plain.difference:.1f} % of the cap lower" in RESULTS
    assert f"lower too, by {-plain.difference:.1f} % of its cap" in PAPER


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
    for page in ("nano/ranks.md", "family/contrasts.md"):
        assert (results / page).read_text() == (KEPT / page).read_text()
    ranks = (KEPT / "nano/ranks.md").read_text()
    slope = re.search(r"changes the loss by -(\S+) \(-(\S+) to -(\S+)\)", ranks)
    whole = re.search(r"LRKV-32 .*\| +-(\S+) \(-(\S+) to -(\S+)\)", ranks)
    said = " ".join(RESULTS.split())
    assert f"loss by {slope[1]} bits per byte ({slope[3]} to {slope[2]})" in said
    assert f"{whole[1]} ({whole[3]} to {whole[2]}) below MHA" in said
    for path in (ROOT / "experiments/results/family").glob("*.json"):
        assert (results / "family" / path.name).read_bytes() == path.read_bytes()


def test_a_trend_is_the_slope_within_seeds():
    """y = 3 x + its seed's, and noise that the textbook formula of a slope's error knows."""
    trend = runpy.run_path(str(ROOT / "experiments/family_pages.py"))["trend"]
    rng, x = np.random.default_rng(2), np.array([1.0, 2.0, 3.0, 4.0])
    y = 3 * x[:, None] + np.array([0.0, 50.0, -20.0]) + rng.normal(size=(4, 3))
    one = trend({str(k): dict(enumerate(row)) for k, row in zip(x, y, strict=True)},
                {str(k): k for k in x})  # fmt: skip
    centred_x, centred_y = x - x.mean(), y - y.mean(0)
    slope = (centred_x[:, None] * centred_y).sum() / (3 * (centred_x**2).sum())
    residual = centred_y - slope * centred_x[:, None]
    error = ((residual**2).sum() / 8 / (3 * (centred_x**2).sum())) ** 0.5
    assert (one.difference, one.error, one.degrees) == pytest.approx((slope, error, 8))


def test_the_page_on_converting_is_what_its_runs_gave_and_they_are_those_of_its_command(tmp_path):
    script = runpy.run_path(str(ROOT / "experiments/converting.py"))
    kept, page = KEPT / "converting/smollm2.jsonl", ROOT / "docs/converting.md"
    assert set(script["FORMS"]) < {one["form"] for one in script["read"](kept)}
    script["write"](kept, Path(shutil.copy(page, tmp_path)))
    assert (tmp_path / page.name).read_text() == page.read_text()
    asked = re.findall(r"--bytes (0\.\d+)", page.read_text() + (ROOT / "README.md").read_text())
    values = 2 * 3 * 64  # of a token and layer; a latent's width is a multiple of 8
    assert [224 <= float(share) * values < 232 for share in asked] == [True] * 3
