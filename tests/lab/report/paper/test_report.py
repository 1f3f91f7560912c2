"""Every table and figure: what it is made of, which files it leaves, and the page they stand on."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from support.paper_cases import cells, report_item
from support.planted_runs import planted
from support.written_runs import write_run
from typer.testing import CliRunner

import lrkv_jax
from lrkv_jax.cli.shared import app
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.report.figures import Picture
from lrkv_jax.lab.report.paper import REPORT_ITEMS
from lrkv_jax.models.attention import MQA

ROOT = Path(lrkv_jax.__file__).parents[1]
# What has nothing of its own of the sweep, or of the analyzed heads.
NOTHING = {
    "table02_downstream", "table09_long_context", "fig04_long_context_curves",
    "fig19_downstream_correlation", "learning_rates", "weighted_ranks",
}  # fmt: skip
# Table 12 fills 1.2 GB, in test_tables.py alone.
ITEMS = [one for one in REPORT_ITEMS if one.name != "table12_cache_bytes"]


@pytest.mark.parametrize("one", ITEMS, ids=lambda one: one.name)
def test_each_is_made_of_what_it_reads(one, of_sweep, of_heads):
    made = (of_heads if one.reads == "analyses" else of_sweep)(one.name)
    assert all(isinstance(m, Picture) == one.name.startswith("fig") for m in made)
    names = [each.name for each in made]
    assert len(set(names)) == len(names), "no file is written twice"
    assert ([name for name in names if name != "printed"] == []) == (one.name in NOTHING)
    without = {each.name for each in one.made([])} - {"printed"}
    assert bool(without) == (one.reads == "configurations")
    if one.reads == "analyses":
        assert [each.name for each in of_sweep(one.name)] in ([], ["printed"])


class Sixth(MQA):
    """A variant that the package does not have, as an outside module would bring it."""

    name: ClassVar[str] = "sixth"
    styles: ClassVar[dict] = {}


def test_a_run_of_a_sixth_kind_passes_through_every_table_and_figure():
    """Five names stood in Table 1, in the paper's scales and in the order of runs."""
    runs = [planted("mha", [4.0 + 0.01 * seed, 3.0], seed=seed) for seed in range(2)]
    for seed in range(2):
        run = planted("mqa", [4.1 + 0.01 * seed, 3.1], seed=seed, path=f"/planted/6-{seed}")
        model = run.config.model.model_copy(update={"attention": Sixth()})
        variants = {"mha": run.config.variants["mha"], "mine": Sixth()}
        new = {"model": model, "attention": "mine", "variants": variants}
        runs.append(replace(run, config=run.config.model_copy(update=new)))
    for one in ITEMS:
        one.made(runs)
    ours, _ = report_item("table01").made(runs)
    assert [row.cells[0].value for row in ours.rows][-1] == "SIXTH"
    assert cells(ours, "SIXTH")["CE"].value == pytest.approx(3.1)
    (curves,) = report_item("fig02").made(runs)
    assert "SIXTH" in {line.get_label() for line in curves.figure.axes[0].lines}


def test_a_page_of_runs_compares_them_and_needs_no_other_file(sweep, tmp_path):
    """The paper's tables come with --paper alone, and nothing is drawn without data."""
    write_run(tmp_path / "runs" / "stopped<b>", until=15)
    (broken := write_run(tmp_path / "runs" / "broken")).joinpath("metrics.jsonl").write_text("{\n")
    some = [str(sweep / f"{name}-seed{seed}") for name in ("mha", "lrkv") for seed in range(3)]
    arguments = ["report", *some, str(tmp_path), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "LRKV-8" in result.output
    assert f"left out: {broken}: metrics.jsonl:1 is not a row" in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    text = (tmp_path / "out/report.html").read_text()
    (comparison,) = re.findall("<b>Comparison, quickstart</b>.*?</table>", text, re.S)
    low, high = map(float, re.search(r"-0\.\d+ \((\S+) to (\S+)\)", comparison).groups())
    assert low < -0.05 / 0.693 / 4 < high < 0, "what was written, in bits"
    assert f"<dt>{broken}</dt>" in text and "stopped&lt;b&gt;: LRKV-8 rope latent, stopped" in text
    assert text.count("<img") == 2 + 7, "held-out curves, no learning rates or speeds"
    assert "Figure" not in text and "paper" not in text.split("</style>")[1]
    links = re.findall(r'(?:href|src)="([^"]*)"', text)
    assert all(link.startswith(("#", "data:image/svg+xml;base64,")) for link in links)
    ids = re.findall(r'id="([^"]*)"', text)
    assert {link[1:] for link in links if link[0] == "#"} <= set(ids)
    assert not re.search(r"url\(|@import|<script|http", text)
    only = CliRunner().invoke(app, [*arguments, "--only", "table01,table05,weighted"])
    assert re.search(r"^heads +6 +12 +12 +18 +32$", only.output, re.M), "columns below one another"
    table = json.loads((tmp_path / "out/table01_pretraining.json").read_text())
    assert table["title"] == "Pretraining" and not list(tmp_path.glob("out/weighted*"))
    assert "<b>The paper&#x27;s values, printed</b>" in (tmp_path / "out/report.html").read_text()


def test_lrkv_report_refuses_in_one_line():
    for option, value, message in (
        ("--only", "fig99", "--only fig99: no table or figure begins so"),
        ("--only", ",", "--only: name a table or figure"),
        ("--only", "weighted", "these analyses have nothing to show there"),
    ):
        result = CliRunner().invoke(app, ["report", option, value])
        assert isinstance(result.exception, LrkvError) and message in str(result.exception)
