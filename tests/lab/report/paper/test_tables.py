"""Tables of runs, of configurations and of caches: counted, measured, and never made up."""

import numpy as np
import pytest
import yaml
from support.paper_cases import cells, report_item
from support.variants import random_params, small
from support.written_runs import write_run

from lrkv_jax.config import load_config
from lrkv_jax.lab.analysis import head_weights
from lrkv_jax.lab.report import paper_values
from lrkv_jax.lab.report.comparison.files import read_runs
from lrkv_jax.lab.report.page import run_parts
from lrkv_jax.lab.report.paper import caches, configurations
from lrkv_jax.lab.report.paper_values import of_paper
from lrkv_jax.models.attention import GQA, LRKV, MHA, MLA, MQA


def printed(table, name="CE"):
    (at,) = (at for at, column in enumerate(table.columns) if column.name == name)
    return {row.cells[0].value: (p := row.cells[at].paper) and p.text for row in table.rows}


def test_table_1_has_means_spreads_and_significant_differences(of_sweep, runs):
    ours, paper = of_sweep("table01")
    mha, lrkv = (cells(ours, name) for name in ("MHA", "LRKV-8"))
    finals = {run.seed: run.cross_entropy for run in runs if run.label == "LRKV-8"}
    assert lrkv["CE"].seeds == finals
    assert lrkv["CE"].value == pytest.approx(sum(finals.values()) / 3)
    assert lrkv["live cache"].note == "A cache in float32."
    assert mha["difference from baseline"].value == ""
    assert lrkv["difference from baseline"].value == "lower (p < 0.001)"
    assert cells(ours, "MLA-32")["difference from baseline"].value.startswith("not found; ")
    assert lrkv["CE"].paper is None, "the paper has no quickstart"
    assert len(paper.rows) == 20


def test_the_paper_s_value_stands_beside_a_run_of_its_setting_alone(of_sweep, tmp_path):
    ours, _ = of_sweep("table08")  # every size beside the baselines
    assert [row.cells[0].value for row in ours.rows] == [
        "MHA", "GQA-2", "MQA", "MLA-32", "LRKV-2", "LRKV-4", "LRKV-8",
    ]  # fmt: skip
    for name in ("mha", "mla", "lrkv", "lrkv_latent"):
        write_run(tmp_path / name, f"attention={name}", scale="128m", steps=None)
    write_run(tmp_path / "r", "name=128m_ranks", rank=16, scale="128m", steps=None)
    for name in ("lrkv", "lrkv_latent"):
        write_run(tmp_path / f"long {name}", f"attention={name}", scale="512m_8k", steps=None)
    short = "attention=lrkv", "train.tokens=1310720"
    write_run(tmp_path / "short", *short, scale="128m", steps=None)
    write_run(tmp_path / "begun", "attention=gqa", until=20)
    runs = read_runs([tmp_path])
    pretraining, _ = report_item("table01").made(runs)
    rows = [(row.cells[0].value, row.cells[2].paper) for row in pretraining.rows]
    assert "GQA-2" not in [name for name, _ in rows], "it has not ended"
    texts = [paper.text if paper else "" for name, paper in rows if name == "LRKV-46"]
    assert sorted(texts) == ["", "2.893"]
    by_size, _ = report_item("table08").made(runs)
    assert printed(by_size) == {
        "MHA": "2.903", "MLA-128": "2.901", "LRKV-16": "2.905", "LRKV-46": None,
        "LRKV-46 rope latent": None,
    }  # fmt: skip
    at_length, _ = report_item("table09").made(runs)
    assert {row.block for row in at_length.rows} == {"512m_8k"}
    assert printed(at_length) == {"LRKV-51": "2.665", "LRKV-52 rope latent": None}
    assert report_item("fig04").made(runs)[0].figure.axes[0].get_title() == "512m_8k"


def test_an_old_run_loads_and_is_named_and_compared_by_its_settings(tmp_path):
    """Once `lrkv` rotated latents, and the paper's model was `lrkv_full`."""
    old = {"lrkv": LRKV(rank=46, rope="latent"), "lrkv_full": LRKV(rank=46, rope="full")}
    for name in old:
        run = write_run(tmp_path / name, scale="128m", steps=None)
        raw = yaml.safe_load((run / "config.yaml").read_text())
        del raw["variants"]["lrkv_latent"]
        raw["variants"] |= {one: entry.model_dump() for one, entry in old.items()}
        (run / "config.yaml").write_text(yaml.safe_dump(raw | {"attention": name}))
        assert load_config(run / "config.yaml").model.attention == old[name]
    # One of today, of the same model under its new name and another seed.
    seed = "train.seed=1", "data.shuffle_seed=1"
    write_run(tmp_path / "new", "attention=lrkv_latent", *seed, scale="128m", steps=None)
    ours, _ = report_item("table01").made(read_runs([tmp_path]))
    lrkv = [row for row in ours.rows if row.cells[0].value.startswith("LRKV")]
    assert len(lrkv) == 2, "both runs of one model are of one row"
    assert printed(ours) == {"LRKV-46": "2.893", "LRKV-46 rope latent": None}


def test_table_2_reads_the_benchmarks(tmp_path):
    task = {"score": 0.25, "examples": 1000}
    for name, score in (("mha", 0.25), ("lrkv_latent", 0.35)):
        evaluation = {"arc_easy": task | {"score": score}, "mmlu": task}
        write_run(tmp_path / name, f"attention={name}", evaluation=evaluation)
    ours, paper = report_item("table02").made(read_runs([tmp_path]))
    lrkv = cells(ours, "LRKV-8 rope latent")
    assert lrkv["ARC-E"].value == pytest.approx(35.0) and "1,000 examples" in lrkv["ARC-E"].note
    assert lrkv["GSM8K"].value is None
    assert len(paper.rows) == 15
    shown = task | {"score": 1.0, "dataset": {"demonstration": True}}
    write_run(tmp_path / "mqa", "attention=mqa", evaluation={"mmlu": shown, "combined": 1.0})
    marked = cells(report_item("table02").made(read_runs([tmp_path]))[0], "MQA")
    assert "1,000 examples of a demonstration set" in marked["MMLU"].note
    assert "no benchmark's" in marked["combined"].note
    (run,) = (run for run in read_runs([tmp_path]) if run.config.attention == "mqa")
    (table,) = (part for part in run_parts(run) if getattr(part, "title", "") == "Benchmarks")
    assert table.rows[0].cells[0].value == "mmlu, demonstration set"


H, K, G, C, R = 4, 8, 2, 12, 3
ENTRIES = {
    "mha": MHA(), "gqa": GQA(kv_heads=G), "mqa": MQA(), "lrkv": LRKV(rank=R, rope="full"),
    "mla": MLA(kv_lora_rank=C, qk_rope_head_dim=0),
}  # fmt: skip


@pytest.mark.parametrize("kind", ENTRIES)
def test_table_4_s_ranks_are_those_of_the_heads(kind):
    """At random weights, and at a width that limits none of them."""
    model = small(ENTRIES[kind], layers=1, width=96, heads=H, head_width=K)
    (heads,) = head_weights(model, random_params(model))
    keys = heads.key_HDK
    together = [np.concatenate(list(some), axis=1) for some in (keys, [*keys, *heads.value_HDK])]
    ranks = [np.linalg.matrix_rank(w, tol=1e-4) for w in (keys[0], *together, keys[0] - keys[1])]
    sizes = {"H": H, "K": K, "G": G, "C": C, "R": R}
    _, _, *stated = configurations.MECHANISMS[kind]
    named = [text.removesuffix(" in a group").replace("·", "*") for text in stated]
    assert [eval(text, sizes) for text in named] == ranks


def test_costs_grow_with_the_cache_and_formulas_as_written_give_the_bytes():
    (table,) = report_item("table10").made([])
    mha, shared, full = (
        list(cells(table, name, "128m, 12 layers").values())
        for name in ("MHA", "LRKV-46 rope shared", "LRKV-46")
    )
    assert mha[2].value == pytest.approx(12 * 4 * 6 * 128 / 1e3)
    assert shared[2].value / mha[2].value == pytest.approx(1 + 46 / 128)
    assert full[2].value > 20 * mha[2].value
    assert shared[6].value == "None" and "depend on T" in shared[6].note
    (formulas,) = report_item("table11").made([])
    for row in formulas.rows:
        _, paper, papers, ours, allocated = (cell.value for cell in row.cells)
        model = of_paper(row.block, row.cells[0].value.lower()).model
        entry = model.attention
        names = {
            "H": model.heads, "K": model.head_width, "C": getattr(entry, "kv_lora_rank", 0),
            "P": getattr(entry, "qk_rope_head_dim", 0), "R": getattr(entry, "rank", 0),
            "Q": entry.cached_ranks(model)[0] if entry.name == "lrkv" else 0,
            "G": getattr(entry, "kv_heads", 0),
        }  # fmt: skip
        for text, given in ((paper, papers), (ours, allocated)):
            assert eval(text.replace("·", "*").replace("R'", "Q"), names) == given


def test_measured_caches_are_their_formulas_beside_what_is_printed(monkeypatch):
    monkeypatch.setattr(caches, "SCALES", ("128m",))
    monkeypatch.setattr(caches, "KINDS", ("mha", "mla", "lrkv"))
    small = load_config("128m", ["model.layers=2", "train.seq_len=64"])
    monkeypatch.setattr(paper_values, "shipped", lambda scale: small)
    (table,) = report_item("table12").made([])
    for row in table.rows:
        *_, published, _, allocated, measured, _ = row.cells
        assert measured.value == allocated.value >= published.value
    assert list(printed(table, "measured").values()) == ["72.0", "24.0", "48.0"]
    lrkv = table.rows[-1].cells
    assert (lrkv[0].value, lrkv[1].value) == ("LRKV-46", 2)
    assert "Rank 64" in lrkv[5].paper.verdict
