"""What is drawn and tabled of heads, on analyses of known answers: nothing is trained."""

import numpy as np
import pytest
from support.paper_cases import HEADS, H, analysed, artefact, cells
from support.written_analyses import alike, write_analysis
from support.written_runs import write_run

from lrkv_jax.lab.report.analysed import FORMS
from lrkv_jax.lab.report.comparison import read_runs
from lrkv_jax.lab.report.figure import Picture
from lrkv_jax.lab.report.looks import apart, look

ALL = (
    "table03", "fig06", "fig07", "fig08", "fig10", "fig12", "fig14", "fig16", "overlap",
    "factorisation", "similarity_gap", "weighted_ranks", "evolution",
)  # fmt: skip
CENTRED = "centred (PCA)"


def curves(axis) -> dict:
    return {line.get_label(): np.asarray(line.get_ydata()) for line in axis.lines}


def titles(made: Picture):
    return {axis.get_title(): axis for axis in made.figure.axes if axis.get_title()}


def test_orthogonal_and_identical_heads_are_tabled_as_they_are(of_heads):
    of = of_heads("table03")[0]
    mha, mqa = cells(of, "MHA"), cells(of, "MQA")
    assert mha["uncentred", "count"].value == pytest.approx(H)
    assert mha[CENTRED, "count"].value == pytest.approx(H - 1)
    assert mha[CENTRED, "% of heads"].value == pytest.approx(100 * (H - 1) / H)
    assert mha[CENTRED, "% of cap"].value == pytest.approx(100)
    assert mqa["uncentred", "% of heads"].value == pytest.approx(100 / H)
    assert mqa[CENTRED, "count"].value == 0 and mqa[CENTRED, "components for 90 %"].value == 0
    change = ("centring changes it by, points of cap", "measured")
    assert mha[change].value == pytest.approx(0, abs=1e-9), "the cap is no loss"
    assert cells(of, "LRKV-4")[change].value > 5, "a common direction, and all others differ"
    assert len(mha["uncentred", "count"].seeds) == 2


def test_the_bars_stand_where_the_table_says(of_heads):
    axes = titles(of_heads("fig07")[0])
    for form in FORMS.values():
        heights = {
            name: [bar.get_height() for bar in axes[f"{form}, {name}"].patches]
            for name in ("uncentred", CENTRED)
        }
        assert heights["uncentred"][::2][:2] == pytest.approx([H, 1])
        assert heights[CENTRED][::2][:2] == pytest.approx([H - 1, 0])
        assert all(H - 2 < one < H - 1 for one in heights[CENTRED][1::2]), "random, under the cap"


def test_lines_by_layer_lie_under_the_cap(of_heads):
    axes = titles(of_heads("fig14")[0])
    lines = curves(axes[f"query–key forms, {CENTRED}"])
    assert lines["MHA"] == pytest.approx(np.full(5, H - 1)) and lines["cap"][0] == H - 1
    lrkv = curves(axes["query–key forms, uncentred"])["LRKV-4"]
    assert (np.diff(lrkv) < 0).all(), "its heads are ever more alike"


def test_spectra_and_cumulative_variance_show_what_heads_have_in_common(of_heads):
    uncentred = titles(of_heads("fig16")[0])
    assert list(uncentred) == ["early: layer 1 of 5", "middle: layer 3 of 5", "late: layer 5 of 5"]
    late = curves(uncentred["late: layer 5 of 5"])
    assert late["MQA"] == pytest.approx([H] + [0] * (H - 1))
    assert late["MHA"] == pytest.approx(np.ones(H))
    assert late["LRKV-4"] == pytest.approx([1 + 0.5 * (H - 1)] + [0.5] * (H - 1))
    centred = curves(titles(of_heads("fig10")[0])["late: layer 5 of 5"])
    assert centred["LRKV-4"] == pytest.approx([0.5] * (H - 1) + [0], abs=1e-9)
    (cumulative,) = of_heads("fig12")
    lines = curves(titles(cumulative)["early: layer 1 of 5"])
    assert lines["MHA"] == pytest.approx([20, 40, 60, 80, 100, 100])
    assert lines["orthogonal heads"] == pytest.approx(lines["MHA"])
    assert lines["90 %"][0] == 90 and "MHA 5, 5, 5; MQA 0, 0, 0" in cumulative.caption


def test_below_spectra_stand_their_distances_from_orthogonal_heads(of_heads):
    """On a logarithmic axis; MHA's, which are orthogonal, have no point there."""
    for name, expected in (
        ("fig16", [0.5 * (H - 1)] + [0.5] * (H - 1)),
        ("fig10", [0.5] * (H - 1) + [np.nan]),
    ):
        late = of_heads(name)[0].figure.axes[5]
        assert late.get_yscale() == "log"
        lines = curves(late)
        assert lines["LRKV-4"] == pytest.approx(expected, nan_ok=True)
        assert np.isnan(lines["MHA"]).all()
    cumulative = of_heads("fig12")[0].figure.axes[3]
    assert cumulative.get_yscale() == "log"
    # Identical heads less their mean are nothing: no share, where orthogonal heads have their own.
    assert curves(cumulative)["MQA"] == pytest.approx([20, 40, 60, 80, 100, 100])


def test_bands_on_a_logarithmic_axis_end_above_its_floor(tmp_path):
    """Seeds whose distances are 0.2 and 0.01: mean less one standard deviation is below 0."""
    for seed, cosine in enumerate((0.2, 0.01)):
        analysed(tmp_path, "mha", lambda layer, cosine=cosine: alike(H, cosine), seed=seed)
    below = artefact("fig16").made(read_runs([tmp_path]))[0].figure.axes[3]
    edges = below.collections[0].get_paths()[0].vertices[:, 1]
    mean, sd = 0.105, (0.2 - 0.01) / 2**0.5
    assert mean - sd < 0
    # The first component is H − 1 times as far as the others are.
    assert edges.max() == pytest.approx((mean + sd) * (H - 1))
    assert edges.min() == pytest.approx(mean**2 / (mean + sd))


def test_no_two_forms_of_a_mode_share_a_colour():
    one = look("lrkv", "latent")
    looks = apart([look("mha"), one, one, one, look("gqa")])
    assert looks[1] == one and len({each.colour for each in looks}) == 5
    assert len({each.marker for each in looks}) == 5


def test_maps_share_their_colours_and_leave_the_diagonal_out(of_heads):
    made = of_heads("fig06")[0]
    images = [image for axis in made.figure.axes for image in axis.images]
    assert len(images) == 3 * 3 and {image.get_clim() for image in images} == {(0.0, 1.0)}
    for image in images:
        assert np.ma.getmaskarray(image.get_array())[np.eye(H, dtype=bool)].all()
    late = images[-1].get_array()
    assert late.compressed() == pytest.approx(np.full(H * (H - 1), 0.5))
    texts = {text.get_text() for axis in made.figure.axes for text in axis.texts}
    assert texts == {"0", "1.00", ".10", ".30", ".50"}


def test_maps_of_logits_stand_beside_those_of_forms_where_text_was_read(tmp_path):
    analysed(tmp_path, "mha", lambda layer: alike(H, 0.0), weighted=0.7)
    analysed(tmp_path, "lrkv", lambda layer: alike(H, 0.2))
    forms, logits = artefact("fig06").made(read_runs([tmp_path]))
    assert [forms.name, logits.name] == ["", "logits"]
    images = [[a.images[0] for a in made.figure.axes if a.images] for made in (forms, logits)]
    assert list(map(len, images)) == [6, 3], "LRKV was analysed without text"
    assert images[1][0].get_array().compressed() == pytest.approx(np.full(H * (H - 1), 0.7))
    left = "analysed without text: lrkv analyze RUN --batches 4: quickstart LRKV-4"
    assert left in logits.gaps and left not in forms.gaps
    texts = [text.get_text() for axis in logits.figure.axes for text in axis.texts]
    assert texts.count("analysed without text") == 3


def test_the_gap_is_that_of_the_layer_less_mha_s(of_heads):
    drawn, tabled = of_heads("similarity_gap")
    lines = curves(titles(drawn)["query–key forms"])
    assert lines["LRKV-4"] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert lines["MQA"] == pytest.approx(np.ones(5)) and "MHA" not in lines
    found = cells(tabled, "LRKV-4")
    assert found["less MHA's"].value == pytest.approx(0.3)
    assert found["largest gap of a layer"].value == pytest.approx(0.5)
    assert found["layers within 0.04"].value == "0 of 5"
    assert found["difference from MHA"].value.startswith("higher (p ")


def test_norms_are_given_as_times_mha_s(of_heads):
    (made,) = of_heads("fig08")
    axis = titles(made)["LRKV-4\nkeys: total 4.50 to 4.50× MHA's"]
    assert curves(axis)["MHA ‖W_h‖"] == pytest.approx(np.full(5, 2.0))
    assert curves(axis)["‖W_shared‖"] == pytest.approx(np.full(5, 7.2))
    assert "3.1-6.7×" in made.caption and "4-5×" in made.caption


def test_overlap_stands_beside_random_residuals(of_heads, heads):
    drawn, of = of_heads("overlap")
    random = curves(titles(drawn)["principal angles of column spaces"])["random columns"]
    # cos² of angles between random subspaces of 4 and 8 dimensions in 48 is 8/48 on average.
    assert np.mean(np.cos(np.radians(random)) ** 2) == pytest.approx(8 / 48, abs=0.06)
    geometry = [run for run in heads if run.kind == "lrkv"][0].analysis["geometry"]["mean"]
    keys = {c.name: cell for c, cell in zip(of.columns, of.rows[0].cells, strict=True)}
    assert of.rows[0].cells[2].value == pytest.approx(geometry["key"]["mean_cosine"])
    assert keys["the paper's"].value == "0.2-0.4" and keys["random"].value == pytest.approx(8 / 48)


def test_fits_fall_with_the_rank_and_the_learnt_split_is_divided(of_heads):
    of_mha, of_lrkv, fits, learnt, _ = of_heads("factorisation")
    assert [of_mha.name, of_lrkv.name] == ["mha", "lrkv-4"]
    axis = titles(of_mha)["keys: error of the weights"]
    heights = np.reshape([bar.get_height() for bar in axis.patches], (3, 3))  # fits × ranks
    left = 1 - np.array([1, 2, 4]) / 8
    assert heights == pytest.approx(100 * np.outer([0.8, 0.7, 0.6], left))
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["1", "2", "4"]
    rows = [one for one in fits.rows if one.cells[2].value == 2]
    assert rows[0].cells[5].value == pytest.approx(45.0)
    assert [cell.value for cell in learnt.rows[0].cells[2:5]] == pytest.approx([60, 30, 10])


def test_shared_energy_is_tabled_of_every_variant_beside_a_random_layer_s(of_heads):
    *_, energy = of_heads("factorisation")
    assert [[cell.value for cell in row.cells[:2]] for row in energy.rows] == [
        [label, of] for label in ("MHA", "MQA", "LRKV-4") for of in ("keys", "values")
    ]
    for row in energy.rows:
        assert [cell.value for cell in row.cells[2:]] == pytest.approx([40, 70, 40, 70])


def test_the_paper_s_rank_stands_beside_the_same_setting_alone(tmp_path):
    for rank in (None, 64):
        run = write_run(
            tmp_path / f"r{rank}", "attention=lrkv", scale="128m", rank=rank, steps=None
        )
        write_analysis(run, lambda layer: alike(6, 0.1))
    run = write_run(tmp_path / "mha", "attention=mha", scale="128m", steps=None)
    write_analysis(run, lambda layer: alike(6, 0.1))
    of = artefact("table03").made(read_runs([tmp_path]))[0]
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
    analysed(tmp_path, "lrkv", lambda layer: alike(H, 0.1))
    analysed(tmp_path, "lrkv", lambda layer: alike(H, 0.2), rank=2)
    runs = read_runs([tmp_path])
    ticks = artefact("fig07").made(runs)[0].figure.axes[0].get_xticklabels()
    assert [tick.get_text() for tick in ticks] == ["LRKV-2", "LRKV-4"]
    assert len([a for a in artefact("fig06").made(runs)[0].figure.axes if a.images]) == 3


def test_what_is_not_analysed_or_not_there_is_named(tmp_path):
    analysed(tmp_path, "mha", lambda layer: alike(H, 0.0))
    write_run(tmp_path / "mha1", "attention=mha", "train.seed=1", *HEADS, steps=20)
    write_run(tmp_path / "mqa", "attention=mqa", *HEADS, steps=20)
    stale = write_run(tmp_path / "lrkv", "attention=lrkv", *HEADS, steps=20)
    write_analysis(stale, lambda layer: alike(H, 0.0), step=10)
    runs = read_runs([tmp_path])
    expected = [
        "no run: quickstart GQA", "no run: quickstart MLA",
        "not analysed: quickstart MHA, seed 1: lrkv analyze RUN",
        "not analysed: quickstart MQA, seed 0: lrkv analyze RUN",
        "analysed at step 10 of 20: quickstart LRKV-4, seed 0: lrkv analyze RUN",
    ]  # fmt: skip
    assert artefact("fig07").made(runs)[0].gaps == expected
    assert artefact("table03").made(runs)[0].gaps == expected[:1] + expected[1:4]


def test_text_s_weights_stand_beside_plain_ranks_and_random_ones(tmp_path):
    for seed in (0, 1):
        run = analysed(tmp_path, "mha", lambda layer: alike(H, 0.0), seed=seed, weighted=1.0)
    (table,) = artefact("weighted_ranks").made(read_runs([tmp_path]))
    assert [row.block.split(", ")[1] for row in table.rows] == list(FORMS.values())
    name, plain, weighted, random, centred, *_, cosine = table.rows[0].cells
    assert name.value == "MHA" and [plain.value, cosine.value] == pytest.approx([100.0, 1.0])
    assert weighted.value == pytest.approx(100 / H) and centred.value == pytest.approx(100.0)
    assert weighted.sd == pytest.approx(0.0) and float(random.value.split(" ± ")[0]) > 90
    write_analysis(run, lambda layer: alike(H, 0.0))
    (table,) = artefact("weighted_ranks").made(read_runs([run]))
    assert table.gaps == ["analysed without text: lrkv analyze RUN --batches 4"]


def test_one_head_has_none_to_be_compared_with(tmp_path):
    for kind in ("mha", "lrkv"):
        run = write_run(
            tmp_path / kind, f"attention={kind}", *HEADS, "model.heads=1",
            "variants.gqa.kv_heads=1", steps=20,
        )  # fmt: skip
        write_analysis(run, lambda layer: alike(1, 0.0))
    runs = read_runs([tmp_path])
    for name in ALL:
        assert artefact(name).made(runs)
    (maps,) = artefact("fig06").made(runs)
    assert maps.empty and "one head, nothing to compare: quickstart" in maps.gaps
