"""What is drawn and tabled of heads, on analyses of known answers: nothing is trained."""

import numpy as np
import pytest
from support.paper_cases import HEADS, H, analyzed, cells, report_item
from support.written_analyses import alike, write_analysis
from support.written_runs import write_run

from lrkv_jax.lab.report.analyzed import FORMS
from lrkv_jax.lab.report.comparison.files import read_runs
from lrkv_jax.lab.report.figures import Picture
from lrkv_jax.lab.report.paper import REPORT_ITEMS

CENTERED = "centered (PCA)"


def curves(axis) -> dict:
    return {line.get_label(): np.asarray(line.get_ydata()) for line in axis.lines}


def titles(made: Picture):
    return {axis.get_title(): axis for axis in made.figure.axes if axis.get_title()}


def test_ranks_are_those_of_the_heads_in_the_table_and_in_every_picture(of_heads):
    of = of_heads("table03")[0]
    mha, mqa = cells(of, "MHA"), cells(of, "MQA")
    assert mha["uncentered", "count"].value == pytest.approx(H)
    assert mha[CENTERED, "count"].value == pytest.approx(H - 1)
    assert mha[CENTERED, "% of heads"].value == pytest.approx(100 * (H - 1) / H)
    assert mha[CENTERED, "% of cap"].value == pytest.approx(100)
    assert mqa["uncentered", "% of heads"].value == pytest.approx(100 / H)
    assert mqa[CENTERED, "count"].value == 0 and mqa[CENTERED, "components for 90 %"].value == 0
    assert len(mha["uncentered", "count"].seeds) == 2
    axes = titles(of_heads("fig07")[0])
    for form in FORMS.values():
        heights = {
            name: [bar.get_height() for bar in axes[f"{form}, {name}"].patches]
            for name in ("uncentered", CENTERED)
        }
        assert heights["uncentered"][::2][:2] == pytest.approx([H, 1])
        assert heights[CENTERED][::2][:2] == pytest.approx([H - 1, 0])
        assert all(H - 2 < one < H - 1 for one in heights[CENTERED][1::2]), "random, under the cap"
    axes = titles(of_heads("fig14")[0])
    lines = curves(axes[f"query–key forms, {CENTERED}"])
    assert lines["MHA"] == pytest.approx(np.full(5, H - 1)) and lines["cap"][0] == H - 1
    lrkv = curves(axes["query–key forms, uncentered"])["LRKV-4"]
    assert (np.diff(lrkv) < 0).all(), "its heads are ever more alike"


def test_spectra_and_cumulative_variance_show_what_heads_have_in_common(of_heads):
    uncentered = titles(of_heads("fig16")[0])
    early, middle, late = "early: layer 1 of 5", "middle: layer 3 of 5", "late: layer 5 of 5"
    assert list(uncentered) == [early, middle, late]
    lines = curves(uncentered[late])
    assert lines["MQA"] == pytest.approx([H] + [0] * (H - 1))
    assert lines["MHA"] == pytest.approx(np.ones(H))
    assert lines["LRKV-4"] == pytest.approx([1 + 0.5 * (H - 1)] + [0.5] * (H - 1))
    lines = curves(titles(of_heads("fig10")[0])[late])
    assert lines["LRKV-4"] == pytest.approx([0.5] * (H - 1) + [0], abs=1e-9)
    (cumulative,) = of_heads("fig12")
    lines = curves(titles(cumulative)[early])
    assert lines["MHA"] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert lines["orthogonal heads"] == pytest.approx(lines["MHA"])
    assert "MHA 5, 5, 5; MQA 0, 0, 0" in cumulative.caption


def test_maps_of_logits_are_where_text_was_read_and_an_ablation_s_sizes_in_bars(tmp_path):
    analyzed(tmp_path, "mha", lambda layer: alike(H, 0.0), weighted=0.7)
    analyzed(tmp_path, "lrkv", lambda layer: alike(H, 0.2))
    analyzed(tmp_path, "lrkv", lambda layer: alike(H, 0.1), rank=2)
    runs = read_runs([tmp_path])
    forms, logits = report_item("fig06").made(runs)
    assert [forms.name, logits.name] == ["", "logits"]
    images = [[a.images[0] for a in made.figure.axes if a.images] for made in (forms, logits)]
    assert list(map(len, images)) == [6, 3], "LRKV was analyzed without text"
    assert images[1][0].get_array().compressed() == pytest.approx(np.full(H * (H - 1), 0.7))
    ticks = report_item("fig07").made(runs)[0].figure.axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["MHA", "LRKV-2", "LRKV-4"]


def test_gaps_norms_overlaps_and_fits_are_those_that_were_written(of_heads, heads):
    found = cells(of_heads("similarity_gap")[0], "LRKV-4")
    assert found["less MHA's"].value.startswith("+0.3000 (")
    assert found["difference from MHA"].value.startswith("higher (p ")
    (made,) = of_heads("fig08")
    lines = curves(titles(made)["LRKV-4\nkeys: total 4.50 to 4.50× MHA's"])
    assert lines["MHA ‖W_h‖"] == pytest.approx(np.full(5, 2.0))
    assert lines["‖W_shared‖"] == pytest.approx(np.full(5, 7.2))
    assert "3.1-6.7×" in made.caption and "4-5×" in made.caption
    (of,) = of_heads("overlap")
    geometry = [run for run in heads if run.kind == "lrkv"][0].analysis["geometry"]["mean"]
    keys = {c.name: cell for c, cell in zip(of.columns, of.rows[0].cells, strict=True)}
    assert of.rows[0].cells[2].value == pytest.approx(geometry["key"]["mean_cosine"])
    assert keys["the paper's"].value == "0.2-0.4" and keys["random"].value == pytest.approx(8 / 48)
    (fits,) = of_heads("factorisation")
    keys = [row.cells[2:6] for row in fits.rows if row.cells[0].value == "MHA"][:3]
    for rank, (shown, *errors) in zip((1, 2, 4), keys, strict=True):
        assert shown.value == rank
        expected = 100 * np.array([0.8, 0.7, 0.6]) * (1 - rank / 8)
        assert [cell.value for cell in errors] == pytest.approx(expected)


def test_the_paper_s_rank_stands_beside_the_same_setting_alone(tmp_path):
    for kind, rank in (("mha", None), ("lrkv", None), ("lrkv", 64)):
        folder = tmp_path / f"{kind}{rank}"
        run = write_run(folder, f"attention={kind}", scale="128m", rank=rank, steps=None)
        write_analysis(run, lambda layer: alike(6, 0.1))
    of = report_item("table03").made(read_runs([tmp_path]))[0]
    texts = {one.cells[0].value: one.cells[2].paper and one.cells[2].paper.text for one in of.rows}
    assert texts == {"MHA": "95.4", "LRKV-46": None, "LRKV-64": "96.2"}


def test_text_s_weights_stand_beside_plain_ranks_and_random_ones(tmp_path):
    for seed in (0, 1):
        run = analyzed(tmp_path, "mha", lambda layer: alike(H, 0.0), seed=seed, weighted=1.0)
    (table,) = report_item("weighted_ranks").made(read_runs([tmp_path]))
    assert [row.block.split(", ")[1] for row in table.rows] == list(FORMS.values())
    name, plain, weighted, random, centered, *_, cosine = table.rows[0].cells
    assert name.value == "MHA" and [plain.value, cosine.value] == pytest.approx([100.0, 1.0])
    assert weighted.value == pytest.approx(100 / H) and centered.value == pytest.approx(100.0)
    assert weighted.sd == pytest.approx(0.0) and float(random.value.split(" ± ")[0]) > 90
    write_analysis(run, lambda layer: alike(H, 0.0))
    assert report_item("weighted_ranks").made(read_runs([run])) == []


def test_one_head_has_none_to_be_compared_with(tmp_path):
    for kind in ("mha", "lrkv"):
        run = write_run(
            tmp_path / kind, f"attention={kind}", *HEADS, "model.heads=1",
            "variants.gqa.kv_heads=1", steps=20,
        )  # fmt: skip
        write_analysis(run, lambda layer: alike(1, 0.0))
    runs = read_runs([tmp_path])
    made = {one.name: one.made(runs) for one in REPORT_ITEMS if one.reads == "analyses"}
    assert made["fig06_head_similarity"] == made["similarity_gap"] == []
    assert made["fig07_effective_rank"] and made["factorisation"]
