"""What is drawn and tabled of heads, on analyses of known answers: nothing is trained."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from written_analyses import alike, scattered, write_analysis
from written_runs import write_run

from lrkv_jax.artefacts import Picture, Table, write
from lrkv_jax.artefacts.heads import (
    ARTEFACTS,
    BARS,
    BY_LAYER,
    CUMULATIVE,
    FACTORISATION,
    GAP,
    MAPS,
    NORMS,
    OVERLAP,
    PCA,
    RANKS,
    UNCENTRED,
    WEIGHTED,
)
from lrkv_jax.artefacts.heads.analysed import FORMS
from lrkv_jax.comparison import read_runs

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
H = 6
SMALL = (
    "model.layers=5", "model.unroll=1", f"model.heads={H}", "model.width=48", "model.head_width=8",
    "variants.gqa.kv_heads=2", "variants.lrkv.rank=4",
)  # fmt: skip


def run_of(folder, kind, cosines, *, seed=0, norm=2.0, ranks=(), **written):
    name = f"{kind}{written.get('rank') or ''}-{seed}"
    run = write_run(
        folder / name, f"attention={kind}", f"train.seed={seed}", *SMALL, steps=20, **written
    )
    write_analysis(run, cosines, norm=norm, ranks=ranks)
    return run


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """MHA's heads are orthogonal, MQA's identical, LRKV's have cosines of 0.1 a layer's number."""
    folder = tmp_path_factory.mktemp("known")
    for seed in (0, 1):
        run_of(folder, "mha", lambda layer: alike(H, 0.0), seed=seed, ranks=(1, 2, 4))
        run_of(folder, "mqa", lambda layer: alike(H, 1.0), seed=seed)
        run_of(folder, "lrkv", lambda layer: alike(H, 0.1 * (layer + 1)), seed=seed, norm=9.0)
    return read_runs([folder])


def picture(artefact, runs) -> Picture:
    return next(one for one in artefact.made(runs) if isinstance(one, Picture))


def table(artefact, runs, name="") -> Table:
    (found,) = [m for m in artefact.made(runs) if isinstance(m, Table) and m.name == name]
    return found


def row(of: Table, name: str):
    """Its cells by (group, column), or by column where it has no group."""
    (found,) = [one for one in of.rows if one.cells[0].value == name]
    return {
        (c.group, c.name) if c.group else c.name: cell
        for c, cell in zip(of.columns, found.cells, strict=True)
    }


def curves(axis) -> dict:
    return {line.get_label(): np.asarray(line.get_ydata()) for line in axis.lines}


def titles(made: Picture):
    return {axis.get_title(): axis for axis in made.figure.axes}


def test_orthogonal_and_identical_heads_are_tabled_as_they_are(known):
    of = table(RANKS, known)
    centred = "centred (PCA)"
    mha, mqa = row(of, "MHA"), row(of, "MQA")
    assert mha["uncentred", "count"].value == pytest.approx(H)
    assert mha[centred, "count"].value == pytest.approx(H - 1)
    assert mha[centred, "% of heads"].value == pytest.approx(100 * (H - 1) / H)
    assert mha[centred, "% of cap"].value == pytest.approx(100)
    assert mqa["uncentred", "% of heads"].value == pytest.approx(100 / H)
    assert mqa[centred, "count"].value == 0 and mqa[centred, "components for 90 %"].value == 0
    change = ("centring changes it by, points of cap", "measured")
    assert mha[change].value == pytest.approx(0, abs=1e-9), "the cap is no loss"
    assert row(of, "LRKV-4")[change].value > 5, "a common direction, and all others differ"
    assert len(mha["uncentred", "count"].seeds) == 2


def test_the_bars_stand_where_the_table_says(known):
    axes = titles(picture(BARS, known))
    for form in ("query–key forms", "value–output forms"):
        heights = {
            name: [bar.get_height() for bar in axes[f"{form}, {name}"].patches]
            for name in ("uncentred", "centred (PCA)")
        }
        assert heights["uncentred"][::2][:2] == pytest.approx([H, 1])
        assert heights["centred (PCA)"][::2][:2] == pytest.approx([H - 1, 0])
        null = heights["centred (PCA)"][1::2]
        assert all(H - 2 < one < H - 1 for one in null), "random heads are under the cap"


def test_lines_by_layer_lie_under_the_cap(known):
    axes = titles(picture(BY_LAYER, known))
    lines = curves(axes["query–key forms, centred (PCA)"])
    assert lines["MHA"] == pytest.approx(np.full(5, H - 1)) and lines["cap"][0] == H - 1
    lrkv = curves(axes["query–key forms, uncentred"])["LRKV-4"]
    assert (np.diff(lrkv) < 0).all(), "its heads are ever more alike"


def test_spectra_show_what_heads_have_in_common(known):
    uncentred = titles(picture(UNCENTRED, known))
    assert list(uncentred) == ["early: layer 1 of 5", "middle: layer 3 of 5", "late: layer 5 of 5"]
    late = curves(uncentred["late: layer 5 of 5"])
    assert late["MQA"] == pytest.approx([H] + [0] * (H - 1))
    assert late["MHA"] == pytest.approx(np.ones(H))
    assert late["LRKV-4"] == pytest.approx([1 + 0.5 * (H - 1)] + [0.5] * (H - 1))
    centred = curves(titles(picture(PCA, known))["late: layer 5 of 5"])
    assert centred["LRKV-4"] == pytest.approx([0.5] * (H - 1) + [0], abs=1e-9)


def test_cumulative_variance_is_linear_for_orthogonal_heads(known):
    made = picture(CUMULATIVE, known)
    lines = curves(titles(made)["early: layer 1 of 5"])
    assert lines["MHA"] == pytest.approx([20, 40, 60, 80, 100, 100])
    assert lines["orthogonal heads"] == pytest.approx(lines["MHA"])
    assert lines["90 %"][0] == 90 and "MHA 5, 5, 5; MQA 0, 0, 0" in made.caption


def test_maps_share_their_colours_and_leave_the_diagonal_out(known):
    made = picture(MAPS, known)
    images = [image for axis in made.figure.axes for image in axis.images]
    assert len(images) == 3 * 3 and len({image.get_clim() for image in images}) == 1
    for image in images:
        assert np.ma.getmaskarray(image.get_array())[np.eye(H, dtype=bool)].all()
    assert images[0].get_clim() == (0.0, 1.0)
    late = images[-1].get_array()
    assert late.compressed() == pytest.approx(np.full(H * (H - 1), 0.5))
    texts = {text.get_text() for axis in made.figure.axes for text in axis.texts}
    assert texts == {"0", "1.00", ".10", ".30", ".50"}


def test_the_gap_is_that_of_the_layer_less_mha_s(known):
    drawn, tabled = GAP.made(known)
    lines = curves(titles(drawn)["query–key forms"])
    assert lines["LRKV-4"] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert lines["MQA"] == pytest.approx(np.ones(5)) and "MHA" not in lines
    found = row(tabled, "LRKV-4")
    assert found["less MHA's"].value == pytest.approx(0.3)
    assert found["largest gap of a layer"].value == pytest.approx(0.5)
    assert found["layers within 0.04"].value == "0 of 5"
    assert found["told apart from MHA"].value.startswith("higher (p = 0")


def test_norms_are_told_as_times_mha_s(known):
    made = picture(NORMS, known)
    axis = titles(made)["keys: LRKV-4's total 4.50 to 4.50× MHA's"]
    assert curves(axis)["MHA ‖W_h‖"] == pytest.approx(np.full(5, 2.0))
    assert curves(axis)["LRKV-4 ‖W_shared‖"] == pytest.approx(np.full(5, 7.2))
    assert "3.1-6.7×" in made.caption and "4-5×" in made.caption


def test_overlap_stands_beside_random_residuals(known):
    drawn, of = OVERLAP.made(known)
    axes = titles(drawn)
    random = curves(axes["principal angles of column spaces"])["random columns"]
    # cos² of angles between random subspaces of 4 and 8 dimensions in 48 is 8/48 on average.
    assert np.mean(np.cos(np.radians(random)) ** 2) == pytest.approx(8 / 48, abs=0.06)
    geometry = [run for run in known if run.kind == "lrkv"][0].analysis["geometry"]["mean"]
    keys = {c.name: cell for c, cell in zip(of.columns, of.rows[0].cells, strict=True)}
    assert of.rows[0].cells[2].value == pytest.approx(geometry["key"]["mean_cosine"])
    assert keys["the paper's"].value == "0.2-0.4" and keys["random"].value == pytest.approx(8 / 48)


def test_fits_fall_with_the_rank_and_the_learnt_split_is_divided(known):
    of_mha, of_lrkv, fits, learnt = FACTORISATION.made(known)
    assert [of_mha.name, of_lrkv.name] == ["mha", "lrkv-4"]
    axis = titles(of_mha)["keys: error of the weights"]
    heights = np.reshape([bar.get_height() for bar in axis.patches], (3, 3))  # fits × ranks
    left = 1 - np.array([1, 2, 4]) / 8
    assert heights == pytest.approx(100 * np.outer([0.8, 0.7, 0.6], left))
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["1", "2", "4"]
    rows = [one for one in fits.rows if one.cells[2].value == 2]
    assert rows[0].cells[5].value == pytest.approx(45.0)
    assert [cell.value for cell in learnt.rows[0].cells[2:5]] == pytest.approx([60, 30, 10])


def test_the_paper_s_own_table_is_recomputed_against_the_cap():
    of = table(RANKS, [], "printed")
    of_cap = {one.cells[0].value: one.cells[3].value for one in of.rows if "2.5B" in one.block}
    rounded = {name: round(value, 1) for name, value in of_cap.items()}
    assert rounded == {"MHA": 99.5, "LRKV, rank 64": 99.0, "GQA": 97.1, "MLA": 97.0, "MQA": 96.4}


def test_the_paper_s_value_stands_beside_the_same_setting_alone(tmp_path):
    for rank in (None, 64):
        run = write_run(tmp_path / f"r{rank}", scale="128m", rank=rank, steps=None)
        write_analysis(run, lambda layer: alike(6, 0.1))
    run = write_run(tmp_path / "mha", "attention=mha", scale="128m", steps=None)
    write_analysis(run, lambda layer: alike(6, 0.1))
    of = table(RANKS, read_runs([tmp_path]))
    texts = {
        one.cells[0].value: [one.cells[at].printed and one.cells[at].printed.text for at in (2, 6)]
        for one in of.rows
        if one.cells[1].value
    }
    assert texts == {
        "MHA": ["95.4", "98.9, recomputed"], "LRKV-46": [None, None],
        "LRKV-64": ["96.2", "99.6, recomputed"],
    }  # fmt: skip


def test_an_ablation_s_sizes_are_in_the_bars_and_not_in_the_maps(tmp_path):
    run_of(tmp_path, "lrkv", lambda layer: alike(H, 0.1))
    run_of(tmp_path, "lrkv", lambda layer: alike(H, 0.2), rank=2)
    runs = read_runs([tmp_path])
    ticks = picture(BARS, runs).figure.axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["LRKV-2", "LRKV-4"]
    assert len([a for a in picture(MAPS, runs).figure.axes if a.images]) == 3


def test_what_is_not_analysed_or_not_there_is_named(tmp_path):
    run_of(tmp_path, "mha", lambda layer: alike(H, 0.0))
    write_run(tmp_path / "mha1", "attention=mha", "train.seed=1", *SMALL, steps=20)
    write_run(tmp_path / "mqa", "attention=mqa", *SMALL, steps=20)
    stale = write_run(tmp_path / "lrkv", "attention=lrkv", *SMALL, steps=20)
    write_analysis(stale, lambda layer: alike(H, 0.0), step=10)
    runs = read_runs([tmp_path])
    expected = [
        "no run: quickstart GQA", "no run: quickstart MLA",
        "not analysed: quickstart MHA, seed 1: lrkv analyze RUN",
        "not analysed: quickstart MQA, seed 0: lrkv analyze RUN",
        "analysed at step 10 of 20: quickstart LRKV-4, seed 0: lrkv analyze RUN",
    ]  # fmt: skip
    assert picture(BARS, runs).gaps == expected
    assert table(RANKS, runs).gaps == expected[:1] + expected[1:4]


def test_text_s_weights_stand_beside_plain_ranks_and_random_ones(tmp_path):
    for seed in (0, 1):
        run = write_run(tmp_path / f"mha-{seed}", "attention=mha", f"train.seed={seed}", *SMALL,
                        steps=20)  # fmt: skip
        write_analysis(run, lambda layer: alike(H, 0.0), weighted=1.0)
    (table,) = WEIGHTED.made(read_runs([tmp_path]))
    assert [row.block.split(", ")[1] for row in table.rows] == list(FORMS.values())
    name, plain, weighted, random, centred, *_, cosine = table.rows[0].cells
    assert name.value == "MHA" and [plain.value, cosine.value] == pytest.approx([100.0, 1.0])
    assert weighted.value == pytest.approx(100 / H) and centred.value == pytest.approx(100.0)
    assert weighted.sd == pytest.approx(0.0) and float(random.value.split(" ± ")[0]) > 90
    write_analysis(run, lambda layer: alike(H, 0.0))
    (table,) = WEIGHTED.made(read_runs([run]))
    assert table.gaps == ["analysed without text: lrkv analyze RUN --batches 4"]


def test_runs_that_are_not_analysed_leave_one_labelled_gap(tmp_path):
    write_run(tmp_path / "mqa", "attention=mqa", steps=20)
    unanalysed = read_runs([tmp_path])
    for artefact in ARTEFACTS:
        for runs, said in ((unanalysed, "not analysed"), ([], "no run")):
            made = [one for one in artefact.made(runs) if one.name != "printed"]
            assert said in made[0].gaps[0] and all(one.gaps for one in made)


@pytest.mark.slow
def test_one_head_has_none_to_be_compared_with(tmp_path):
    for kind in ("mha", "lrkv"):
        run = write_run(
            tmp_path / kind, f"attention={kind}", *SMALL, "model.heads=1",
            "variants.gqa.kv_heads=1", steps=20,
        )  # fmt: skip
        write_analysis(run, lambda layer: alike(1, 0.0))
    for artefact in ARTEFACTS:
        assert artefact.made(read_runs([tmp_path]))


@pytest.mark.parametrize("artefact", ARTEFACTS, ids=lambda one: one.name)
def test_each_is_a_script_under_its_name(artefact):
    text = (EXPERIMENTS / f"{artefact.name}.py").read_text()
    assert f"python experiments/{artefact.name}.py" in text and "command(ARTEFACT)" in text


@pytest.mark.slow
def test_the_paper_s_sizes_are_drawn_and_written(tmp_path):
    for number, kind in enumerate(("mha", "gqa", "mqa", "mla", "lrkv")):
        run = write_run(tmp_path / kind, f"attention={kind}", scale="2.5b", steps=None)
        write_analysis(
            run, lambda layer, n=number: scattered(18, 0.1 + 0.1 * n, 50 * n + layer), ranks=(8, 32)
        )
    for artefact in ARTEFACTS:
        made = artefact.made(read_runs([tmp_path]))
        assert all(path.stat().st_size > 100 for path in write(artefact, made, tmp_path / "out"))


@pytest.mark.slow
def test_a_script_writes_its_files(known, tmp_path):
    done = subprocess.run(
        [sys.executable, EXPERIMENTS / "fig07_effective_rank.py", known[0].path.parent,
         "--out", tmp_path],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [Path(line).name for line in done.stdout.split()] == [
        "fig07_effective_rank.png", "fig07_effective_rank.svg",
    ]  # fmt: skip
    assert "gap: no run: quickstart GQA" in done.stderr
