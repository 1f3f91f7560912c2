"""A converted run is exact where its form spans the old one's; a fit is the best of its form."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from support.command import lrkv
from support.meshes import mesh_of
from support.variants import HEAD_WIDTH, error, random_params, small

from lrkv_jax import files
from lrkv_jax.config import dump_config, load_config
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.errors import LrkvError
from lrkv_jax.interop import fits
from lrkv_jax.interop.convert import convert, fit_layer, fitted_parameters, heads_of
from lrkv_jax.interop.fits import Calibration
from lrkv_jax.interop.importing import write_run
from lrkv_jax.models.attention import GQA, LRKV, MHA, MLA
from lrkv_jax.models.transformer import with_parameters
from lrkv_jax.training.restore import load_run

SMALL = (
    "model.layers=2", "model.width=24", "model.heads=4", "model.head_width=8", "model.unroll=1",
    "model.feed_forward=32", "train.seq_len=32", "train.steps=1",
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 64, (2, 24))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("The cache is what people pay for, and keys are cheaper than values. " * 20)
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A function (variant, *settings) → the directory of a run with random weights."""
    made, folder = {}, tmp_path_factory.mktemp("runs")

    def run(variant, *settings):
        if (variant, settings) not in made:
            config = load_config("nano", [*SMALL, f"attention={variant}", *settings])
            directory = folder / f"{variant}{len(made)}"
            with files.whole_folder(directory) as fresh:
                tokenizer = load_tokenizer(config.data.tokenizer)
                write_run(fresh, directory, config, random_params(config.model), tokenizer)
            made[variant, settings] = directory
        return made[variant, settings]

    return run


def logits(model, params):
    return jax.jit(with_parameters(model, params))(IDS)


def calibration(model):
    rng = np.random.default_rng(1)
    wide = rng.normal(size=(model.width, 2 * model.width))
    energy_HJ = rng.uniform(0.5, 2, size=(model.heads, model.head_width // 2))
    return Calibration(wide @ wide.T, energy_HJ)


SPANNING = LRKV(rank=HEAD_WIDTH, kv_heads=2, rope="full")


FULL_MLA = {"rope": "full", "latent_norm": False}


@pytest.mark.parametrize(
    ("old", "changes", "new"),
    [
        (GQA(kv_heads=2), {"qk_gain": True}, SPANNING),
        (MHA(), {"norm_gain": True, "qkv_bias": True}, MLA(kv_lora_rank=16, rank=8, **FULL_MLA)),
        (GQA(kv_heads=2), {"qk_norm": False, "qkv_bias": True}, SPANNING),
        (
            GQA(kv_heads=2),
            {"qk_norm": False, "qkv_bias": True},
            LRKV(rank=HEAD_WIDTH, kv_heads=4, rope="full"),
        ),
        (LRKV(rank=3, rope="full"), {}, MLA(kv_lora_rank=22, rank=8, **FULL_MLA)),
    ],
    ids=["gqa-lrkv-gain", "mha-mla-rank", "gqa-lrkv-bias", "more-heads-bias", "lrkv-mla"],
)
def test_a_form_that_spans_the_old_one_gives_its_logits(old, changes, new):
    before, after = (small(entry, vocabulary=64, **changes) for entry in (old, new))
    params = random_params(before)
    fitted = [
        fit_layer(after, layer, heads, calibration(after), biases)
        for layer, (heads, biases) in enumerate(heads_of(before, params))
    ]
    assert max(one.key_error + one.value_error for one in fitted) < 1e-10
    converted = fitted_parameters(after, params, fitted, mesh_of())
    assert error(logits(after, converted), logits(before, params)) < 2e-5


@pytest.mark.parametrize("entry", [SPANNING, MLA(kv_lora_rank=24, **FULL_MLA)])
def test_heads_that_nothing_reads_are_refused_and_a_dead_coordinate_is_none_the_worse(entry):
    before, after = small(GQA(kv_heads=2)), small(entry)
    (heads, _), *_ = heads_of(before, random_params(before))
    dead = replace(heads, output_HKD=heads.output_HKD * (np.arange(HEAD_WIDTH) > 0)[:, None])
    found = fit_layer(after, 0, dead, calibration(after))
    assert found.value_error < 1e-10 and found.condition < 1e7
    with pytest.raises(LrkvError, match="layer 3 has .* are zero, as before training"):
        fit_layer(after, 3, replace(heads, output_HKD=heads.output_HKD * 0), calibration(after))


@pytest.mark.slow
def test_widths_are_chosen_for_a_share_of_the_cache_by_their_errors(
    runs, text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sotu-4096").mkdir()  # the name is the package's tokenizer all the same
    before = runs("mha", "model.head_width=16")
    how = {"names": [text], "tokens": 64, "heldout": 64, "context": 16}
    found = convert(before, tmp_path / "new", ["attention=lrkv"], share=1.1, **how)
    assert load_run(tmp_path / "new").config.data.tokenizer == "sotu-4096"
    # A layer: 2 (2 · 16 + 4 (R_k + R_v)) bytes and 4 float32 norms, of 256: ranks of 24 together.
    ranks = found["attention"]["rank_key"], found["attention"]["rank_value"]
    assert sorted(ranks) == [8, 16]
    assert found["bytes_per_token"] == {"before": 512, "after": 544, "share": 544 / 512}
    asked = [f"attention.{n}={r}" for n, r in zip(("rank_value", "rank_key"), ranks, strict=True)]
    other = convert(
        before, tmp_path / "other", ["attention=lrkv", "attention.rank=16", *asked], **how
    )
    # Every fourth layer decides: here the first.
    costs = [
        16 * one["layers"][0]["key_error"] + one["layers"][0]["value_error"]
        for one in (found, other)
    ]
    assert costs[0] < costs[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "asked", "message"),
    [
        ("mha", ["attention.rank=4"], "no attention=KIND is given: use attention=lrkv"),
        ("mha", ["attention=gqa"], "attention = gqa is not a variant"),
        ("mha", ["attention=mla", "model.width=48"], "model.width=48: a conversion changes attent"),
        ("mha", ["attention=lrkv", "attention.rank=9"], "attention.rank = 9 is larger than"),
        ("mha", ["attention=lrkv", "attention.rope=latent"], "keys are rotated whole and linear"),
        ("mla", ["attention=lrkv"], "is MLA-32: convert a run of MHA, GQA, MQA, or LRKV in rope"),
        ("mha", ["attention=mla", "--bytes", "0.01"], "--bytes 0.01: no width of mla is so small"),
        ("mha", ["attention=lrkv", "attention.rank=4", "--bytes", "0.9"], "rank=4: --bytes"),
        ("mha", ["attention=mla", "--text", "absent.txt"], "--text absent.txt cannot be read"),
        ("mha", ["attention=mla", "--context", "300"], "tokens, and one part in 5 of it must be"),
    ],
)
def test_what_cannot_be_converted_is_one_line_and_leaves_nothing(
    runs, text, capsys, monkeypatch, tmp_path, variant, asked, message
):
    new = tmp_path / "new"
    how = ["--text", text, "--tokens", "64", "--heldout", "64", "--context", "16"]
    how = [one for one in how if "--text" not in asked or one not in ("--text", text)]
    arguments = ("convert", str(runs(variant)), str(new), *how, *asked)
    code, _, err = lrkv(capsys, monkeypatch, *arguments)
    assert code == 2 and message in err.splitlines()[-1], err
    assert not new.exists()


@pytest.mark.slow
def test_the_command_shows_errors_losses_and_bytes(runs, text, capsys, monkeypatch, tmp_path):
    new = tmp_path / "new"
    arguments = (
        "convert", str(runs("mha", "model.qk_gain=true")), str(new),
        "attention=mla", "attention.kv_lora_rank=24",
        "--text", text, "--tokens", "64", "--heldout", "64", "--context", "16",
    )  # fmt: skip
    source = Path(arguments[1])
    dtypes = ["model.dtype=float32", "optimizer.muon.dtype=float32"]
    config = load_config(source / "config.yaml", dtypes)
    begun = config.model_copy(update={"init_from": "before", "init_step": 3})
    (source / "config.yaml").write_text(dump_config(begun))  # of a midtrained run
    (source / "history.jsonl").write_text('{"event": "start", "asked_dtype": "auto"}\n')
    code, out, _ = lrkv(capsys, monkeypatch, *arguments)
    assert code == 0
    new_config = load_config(new / "config.yaml")
    assert (new_config.model.dtype, new_config.optimizer.muon.dtype) == ("auto", "auto")
    report = json.loads((new / "conversion.json").read_text())
    assert f"{report['layers'][1]['value_error']:.4f}" in out and Path(text).name in out
    assert "bytes of cache per token" in out
    _, *healing, teacher = out.splitlines()[-1].split()
    assert load_config(healing[2], healing[3:]).train.trainable == "keys_and_values"
    assert teacher == f"train.teacher={arguments[1]}"
    found = load_run(new).config
    assert found.run_dir == str(new) and found.init_from is None and found.attention == "mla"
    (loss,) = report["loss"].values()
    assert loss["after"] == pytest.approx(loss["before"], abs=1e-4)  # 24 is the model's width


D, G, H, K, R = 40, 3, 6, 8, 2
J = K // 2


@pytest.fixture(scope="module")
def drawn():
    """(calibration, output, keys' reader, values' reader, shared, residuals, turns)."""
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(D, 2 * D))
    calibration = Calibration(wide @ wide.T / D, rng.uniform(0.5, 2, size=(H, J)))
    output_HKD = rng.normal(size=(H, K, D))
    residual_GDK = rng.normal(size=(G, D, R)) @ rng.normal(size=(G, R, K))
    turns_GJ = rng.normal(size=(G, J)) + 1j * rng.normal(size=(G, J))
    readers = calibration.of_keys(G), fits.reader_of_values(output_HKD, G)
    return calibration, output_HKD, readers, rng.normal(size=(D, K)), residual_GDK, turns_GJ


def key_error(drawn, family_GDK, **how):
    calibration, _, (reader_GK, _), *_ = drawn
    reduced = fits.Reduced.of(calibration.moment_DD, family_GDK)
    fit = fits.shared_keys(reduced.parts[0], reduced.back_DM, reader_GK, R, **how)
    reader_GKK = reader_GK[:, :, None] * np.eye(K)
    error = fits.relative_error(family_GDK, fit.total_GDK, calibration.moment_DD, reader_GKK)
    return error, fit


@pytest.mark.parametrize("free", ["nothing", "phase", "any"])
def test_keys_of_one_shared_matrix_are_found_in_each_head_s_own_gauge(drawn, free):
    *_, shared_DK, residual_GDK, turns_GJ = drawn
    gauge = {"nothing": np.ones_like(turns_GJ), "phase": turns_GJ / abs(turns_GJ), "any": turns_GJ}
    # Pairs of each group's columns times its complex numbers.
    total_GDK = shared_DK + residual_GDK
    z = (total_GDK[..., :J] + 1j * total_GDK[..., J:]) * gauge[free][:, None]
    family_GDK = np.concatenate([z.real, z.imag], axis=-1)
    error, fit = key_error(drawn, family_GDK, free=free)
    assert error < 2e-3
    # What queries are multiplied by commutes with every rotation of pairs.
    angle = np.exp(1j * np.linspace(0, 2, J))[None].repeat(G, axis=0)
    rotation_GKK = fits._as_matrices(angle)
    both = fit.gauge_GKK @ rotation_GKK, rotation_GKK @ fit.gauge_GKK
    assert np.allclose(*both, atol=1e-12)
    if free == "phase":
        assert np.allclose(fit.gauge_GKK @ fit.gauge_GKK.swapaxes(1, 2), np.eye(K), atol=1e-12)
    if free != "nothing":
        assert key_error(drawn, family_GDK, free="nothing")[0] > 20 * error


def test_values_of_one_shared_matrix_are_found_in_any_basis_of_each_group(drawn):
    calibration, _, (_, reader_GKK), shared_DK, residual_GDK, _ = drawn
    basis_GKK = np.random.default_rng(1).normal(size=(G, K, K))
    family_GDK = (shared_DK + residual_GDK) @ basis_GKK
    reduced = fits.Reduced.of(calibration.moment_DD, family_GDK)
    fit = fits.shared_values(reduced.parts[0], reduced.back_DM, reader_GKK, R)
    found = fits.relative_error(family_GDK, fit.total_GDK, calibration.moment_DD, reader_GKK)
    assert found < 2e-3


def test_a_direction_that_a_group_hardly_has_is_left_to_its_residual(drawn):
    calibration, _, (_, reader_GKK), shared_DK, residual_GDK, _ = drawn
    basis_GKK = np.stack([np.eye(K)] * G)
    basis_GKK[0, 0] *= 1e-9
    family_GDK = (shared_DK + 0 * residual_GDK) @ basis_GKK
    reduced = fits.Reduced.of(calibration.moment_DD, family_GDK)
    fit = fits.shared_values(reduced.parts[0], reduced.back_DM, np.stack([np.eye(K)] * G), R)
    assert fit.condition < 2 / fits.CONDITION
    assert fits.relative_error(family_GDK, fit.total_GDK, calibration.moment_DD, reader_GKK) < 1e-8


@pytest.mark.parametrize("rank", [0, R])
def test_one_latent_is_the_best_of_its_width_and_private_ones_lower_its_error(drawn, rank):
    calibration, _, (keys_GK, values_GKK), *_ = drawn
    rng = np.random.default_rng(2)
    families = rng.normal(size=(2, G, D, K))
    readers = keys_GK[:, :, None] * np.eye(K), values_GKK
    reduced = fits.Reduced.of(calibration.moment_DD, *families)
    fit = fits.joint(reduced, readers, 9, rank, weights=(3.0, 1.0))
    root_DD = fits.root(calibration.moment_DD, fits.FLOOR)
    read = [root_DD @ family @ N for family, N in zip(families, readers, strict=True)]
    left = [root_DD @ (f - t) @ N for f, t, N in zip(families, fit.total, readers, strict=True)]
    error = sum(
        (w * np.linalg.norm(a) / np.linalg.norm(b)) ** 2
        for w, a, b in zip((3, 1), left, read, strict=True)
    )
    scaled = [w * y / np.linalg.norm(y) for w, y in zip((3, 1), read, strict=True)]
    columns = np.concatenate([one.transpose(1, 0, 2).reshape(D, -1) for one in scaled], axis=1)
    best = np.sum(np.linalg.svd(columns, compute_uv=False)[9:] ** 2)
    assert error == pytest.approx(best) if not rank else error < 0.9 * best


def test_the_metric_is_the_error_of_what_heads_write_and_of_logits(drawn):
    """Of values exactly; of logits as a mean over all rotations, here all of a grid of phases."""
    calibration, output_HKD, (keys_GK, values_GKK), *_ = drawn
    rng = np.random.default_rng(3)
    family, other = rng.normal(size=(2, G, D, K))
    root_DD = fits.root(calibration.moment_DD, fits.FLOOR)

    def written(weights_GDK):
        each = np.repeat(root_DD @ weights_GDK, H // G, axis=0) @ output_HKD
        return np.sum(each**2)

    share = written(family - other) / written(family)
    moment = calibration.moment_DD
    assert fits.relative_error(family, other, moment, values_GKK) == pytest.approx(share)

    # Queries of one magnitude per pair, at every relative phase of four values a pair.
    q_HJ = np.sqrt(calibration.energy_HJ)
    phases = np.array(list(itertools.product(np.exp(0.5j * np.pi * np.arange(4)), repeat=J)))

    def logits(weights_GDK):
        k = np.repeat(root_DD @ weights_GDK, H // G, axis=0)
        k_HDJ = k[..., :J] + 1j * k[..., J:]
        return np.sum(np.einsum("PJ,HJ,HDJ->PHD", phases, q_HJ, k_HDJ.conj()).real ** 2)

    reader_GKK = keys_GK[:, :, None] * np.eye(K)
    share = logits(family - other) / logits(family)
    assert fits.relative_error(family, other, moment, reader_GKK) == pytest.approx(share)
