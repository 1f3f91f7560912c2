"""Every script of a table or figure, on runs written by hand: nothing is trained."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from written_runs import write_run, write_sweep

from lrkv_jax.artefacts import Picture, Section, Table, command, page, panels, style, write
from lrkv_jax.comparison import read_runs
from lrkv_jax.errors import EXIT_BAD_INPUT

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SLOW = ("fig", "table12")
SCRIPTS = [p for p in sorted(EXPERIMENTS.glob("*.py")) if "\nARTEFACT = " in p.read_text()]


def script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_name(name):
    return script(EXPERIMENTS / f"{name}.py").ARTEFACT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sweep(tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="module")
def runs(folder):
    return read_runs([folder])


@pytest.mark.parametrize("path", [
    # A figure takes half a second to write, and there are twenty; Table 12 fills 1.2 GB.
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * path.stem.startswith(SLOW))
    for path in SCRIPTS
])  # fmt: skip
def test_a_script_makes_its_files_with_runs_and_without(path, runs, tmp_path):
    made = script(path).ARTEFACT
    assert made.name == path.stem, "files are named as their script"
    for some in (runs, []):
        written = write(made, made.made(some), tmp_path / str(len(some)))
        assert written and all(file.stat().st_size > 100 for file in written)
        assert all(file.name.startswith(path.stem) for file in written)
        # What is left of Unicode, LaTeX's default fonts have not.
        assert all(file.read_text().isascii() for file in written if file.suffix == ".tex")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_says_how_it_is_called(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 150
    assert f"python experiments/{path.name}" in text and "    command(" in text


def cells(table, block, name):
    """A row's cells by their column's name."""
    (row,) = [r for r in table.rows if r.block == block and r.cells[0].value == name]
    return {column.name: cell for column, cell in zip(table.columns, row.cells, strict=True)}


def test_table_1_has_means_spreads_and_what_can_be_told(runs):
    ours, paper = by_name("table01_pretraining").made(runs)
    mha, lrkv = (cells(ours, "quickstart", name) for name in ("MHA", "LRKV-8"))
    finals = {run.seed: run.cross_entropy for run in runs if run.label == "LRKV-8"}
    assert lrkv["CE"].seeds == finals
    assert lrkv["CE"].value == pytest.approx(sum(finals.values()) / 3)
    assert mha["told apart from MHA"].value == ""
    assert lrkv["told apart from MHA"].value.startswith("lower (p = 0.0")
    assert cells(ours, "quickstart", "MLA-32")["told apart from MHA"].value.startswith("none (p = ")
    assert lrkv["CE"].printed is None, "the paper has no quickstart"
    assert len(paper.rows) == 20 and not ours.gaps


def test_a_missing_or_unfinished_variant_is_a_labelled_gap(tmp_path):
    write_run(tmp_path / "mha", "attention=mha", evaluation={})
    write_run(tmp_path / "mla", "attention=mla", until=20)
    ours, _ = by_name("table01_pretraining").made(read_runs([tmp_path]))
    assert ours.gaps == [
        "no run: quickstart GQA", "no run: quickstart MQA", "not finished: quickstart MLA-32",
        "no run: quickstart LRKV",
    ]  # fmt: skip


def test_the_paper_s_value_stands_beside_a_run_of_its_setting_alone(tmp_path):
    write_run(tmp_path / "same", "attention=lrkv", scale="128m", steps=None, loss=lambda s: 2.9)
    write_run(
        tmp_path / "short", "attention=lrkv", "train.tokens=1310720", scale="128m", steps=None
    )
    ours, paper = by_name("table01_pretraining").made(read_runs([tmp_path]))
    printed = {
        row.block: row.cells[3].printed for row in ours.rows if row.cells[0].value == "LRKV-46"
    }
    assert sorted(p.text if p else "" for p in printed.values()) == ["", "2.893"]
    assert len(paper.rows) == 19, "its own row is not printed twice"


def test_table_2_reads_the_benchmarks(tmp_path):
    task = {"score": 0.25, "examples": 1000, "style": "letters"}
    for name in ("mha", "lrkv"):
        evaluation = {"arc_easy": task | {"score": 0.25 + 0.1 * (name == "lrkv")}, "mmlu": task}
        write_run(tmp_path / name, f"attention={name}", evaluation=evaluation)
    ours, paper = by_name("table02_downstream").made(read_runs([tmp_path]))
    lrkv = cells(ours, "quickstart, pretrained alone", "LRKV")
    assert lrkv["ARC-E"].value == pytest.approx(35.0) and "1,000 examples" in lrkv["ARC-E"].note
    assert "not asked: quickstart, pretrained alone lrkv gsm8k" in ours.gaps
    assert len(paper.rows) == 15


def test_table_4_s_stated_ranks_are_the_measured_ones():
    (table,) = by_name("table04_mechanisms").made([])
    for row in table.rows:
        assert all("found" not in str(cell.value) for cell in row.cells)
        assert all(re.search(r": \d+$", cell.value) for cell in row.cells[3:])


def test_table_4_tells_when_a_stated_rank_is_wrong(monkeypatch):
    module_spec = importlib.util.spec_from_file_location(
        "t4", EXPERIMENTS / "table04_mechanisms.py"
    )
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    form, axis, one, *rest = module.STATED["lrkv"]
    monkeypatch.setitem(module.STATED, "lrkv", (form, axis, ("R", 3), *rest))
    assert "R: 3 stated, 8 found" in [cell.value for cell in module.make([]).rows[-1].cells]


def test_table_8_has_every_size_beside_the_baselines(runs):
    ours, _ = by_name("table08_rank_ablation").made(runs)
    assert [row.cells[0].value for row in ours.rows] == [
        "MHA", "GQA-2", "MQA", "MLA-32", "LRKV-2", "LRKV-4", "LRKV-8",
    ]  # fmt: skip
    assert "no MHA beside it" not in [row.cells[-1].value for row in ours.rows]


def test_table_8_s_printed_values_stand_beside_the_128m_ablation(tmp_path):
    write_run(tmp_path / "r", "name=128m_ranks", rank=16, scale="128m", steps=None)
    for name in ("mha", "mla", "lrkv"):
        write_run(tmp_path / name, f"attention={name}", scale="128m", steps=None)
    ours, _ = by_name("table08_rank_ablation").made(read_runs([tmp_path]))
    texts = {row.cells[0].value: (p := row.cells[3].printed) and p.text for row in ours.rows}
    assert texts == {"MHA": "2.903", "MLA-128": "2.901", "LRKV-16": "2.905", "LRKV-46": None}


def test_table_9_takes_the_long_contexts(tmp_path):
    write_run(tmp_path / "long", "attention=lrkv", scale="512m_8k", steps=None)
    write_run(tmp_path / "short", "attention=lrkv")
    ours, _ = by_name("table09_long_context").made(read_runs([tmp_path]))
    assert {row.block for row in ours.rows} == {"512m_8k"}
    assert cells(ours, "512m_8k", "LRKV")["CE"].printed.text == "2.665"


def test_a_picture_s_bytes_are_the_same_each_time(runs, tmp_path):
    made = by_name("fig02_loss_curves")
    first, again = (write(made, made.made(runs[:2]), tmp_path / name) for name in ("one", "two"))
    for one, two in zip(first, again, strict=True):
        assert one.read_bytes() == two.read_bytes()
    assert [path.suffix for path in first] == [".png", ".svg"]


def test_a_command_prints_what_it_wrote_and_what_is_missing(folder, tmp_path, capsys):
    arguments = [str(folder / "mha-seed0"), "--out", str(tmp_path / "new")]
    command(by_name("table01_pretraining"), arguments)
    said = capsys.readouterr()
    assert all(Path(line).is_file() for line in said.out.split())
    assert "gap: no run: quickstart LRKV" in said.err
    table = json.loads((tmp_path / "new/table01_pretraining.json").read_text())
    assert table["title"] == "Pretraining"


def test_a_path_that_is_no_run_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        command(by_name("fig02_loss_curves"), [str(tmp_path / "absent")])
    assert end.value.code == EXIT_BAD_INPUT
    assert capsys.readouterr().err.count("\n") == 1


class Reading(HTMLParser):
    """Ids, what refers to something, and text of a page; raises where tags do not match."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.text = [], [], [], ""

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes[key] for key in ("href", "src") if key in attributes]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_nothing_beside_itself(runs):
    with style():
        figure, _ = panels()
    picture = Picture("Nothing <yet>", figure, gaps=["no run: x"])
    table = by_name("table01_pretraining")
    sections = [Section("fig", "A figure", made=[picture]), Section.of(table, table.made(runs[:1]))]
    text = page("Runs <of> ours", sections)
    read = Reading()
    read.feed(text)
    assert not read.open and "Runs <of> ours" in read.text
    assert all(link.startswith(("#", "data:image/svg+xml;base64,")) for link in read.links)
    assert {link[1:] for link in read.links if link[0] == "#"} <= set(read.ids)
    assert "no run: quickstart" in read.text and "jax" in read.text
    assert not re.search(r"url\(|@import|<script|http", text)


@pytest.mark.slow
def test_the_report_is_made_of_all_scripts_in_a_minute(folder, tmp_path):
    done = subprocess.run(
        [sys.executable, EXPERIMENTS / "report.py", folder, "--out", tmp_path], timeout=60,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    text = (tmp_path / "report.html").read_text()
    for path in SCRIPTS:
        assert f'id="{path.stem}"' in text and list(tmp_path.glob(f"{path.stem}*"))
    assert "report.html" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("pdflatex"), reason="no LaTeX here")
def test_latex_compiles(runs, tmp_path):
    inputs = []
    for path in SCRIPTS:
        made = script(path).ARTEFACT
        written = write(made, [m for m in made.made(runs) if isinstance(m, Table)], tmp_path)
        inputs += [rf"\input{{{p.name}}}" for p in written if p.suffix == ".tex"]
    (tmp_path / "all.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs}\\begin{document}"
        + "\\clearpage ".join(inputs) + "\\end{document}"
    )  # fmt: skip
    halt = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "all.tex"]
    subprocess.run(halt, cwd=tmp_path, check=True, capture_output=True)
