"""The curve of conversions: every stage is measured once, and what is cut short goes on."""

import json

import pytest
from support.command import lrkv
from support.planted_models import LLAMA, plant
from support.tiny import few_pages

from lrkv_jax.interop.convert import BALANCE, convert

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]

HEALING = (
    "train.steps=2", "train.batch=8", "train.context=16", "train.save_every=1",
    "optimizer.warmup=1", "optimizer.constant=0",
)  # fmt: skip


def test_each_form_is_converted_healed_and_measured_once(experiment, tmp_path, capsys, monkeypatch):
    converting = experiment("converting")

    def here(command, check):  # a process would import everything again
        assert check and command[1:3] == ["-m", "lrkv_jax.cli"]
        assert lrkv(capsys, monkeypatch, *command[3:])[0] == 0

    monkeypatch.setattr(converting.subprocess, "run", here)
    source, unseen = tmp_path / "run", tmp_path / "unseen.txt"
    pages = few_pages(tmp_path)
    plant(source, "attention=gqa", "variants.gqa.kv_heads=2", *LLAMA, *pages)
    unseen.write_text("Whoever holds a copy may hold another, if this notice stays. " * 30)
    forms = ["attention=mla attention.latent=24", "attention=lrkv attention.rank=3"]
    results = tmp_path / "results.jsonl"

    def measure(forms, **how):
        converting.measure(
            source, forms, unseen, tmp_path / "out", results,
            context=16, tokens=64, healing=(*HEALING, *pages), **how,
        )  # fmt: skip
        return converting.read(results)

    first = measure(forms[:1])
    assert [one["stage"] for one in first] == ["parent", "converted", "healed"]
    assert all(set(one["loss"]) == {"own", "docstrings", "unseen"} for one in first)
    parent, converted, healed = first
    assert converted["share"] < 1 and healed["tokens"] == 2 * 8 * 16
    assert parent["loss"] != converted["loss"] != healed["loss"]
    # What is kept is not measured again, and what was cut short is taken up where it was.
    last = measure(forms)
    assert last[:3] == first and [one["form"] for one in last[3:]] == forms[1:] * 2
    both = measure(forms[:1], both=True)
    assert both[:-1] == last and both[-1]["stage"] == "healed_on_both"
    page = tmp_path / "page.md"
    page.write_text("<!-- converting -->\n\n<!-- end of converting -->\n")
    converting.write(results, page)
    more = converted["loss"]["unseen"] - parent["loss"]["unseen"]
    assert (
        f"{more:+.3f}" in page.read_text()
        and "`attention=lrkv attention.rank=3`" in page.read_text()
    )


def test_errors_are_put_beside_losses_and_widths_beside_one_width(experiment, tmp_path):
    predicting = experiment("predicting")
    plant(
        tmp_path / "run", "attention=gqa", "variants.gqa.kv_heads=2", *LLAMA, *few_pages(tmp_path)
    )
    seen = predicting.Seen(tmp_path / "run", context=16, tokens=64)
    results = tmp_path / "results.jsonl"
    for _ in range(2):  # nothing is measured twice
        predicting.measure(seen, [2], results)
    whole, *others = predicting.read(results)
    assert len({tuple(one["fit"]) for one in others}) == len(others) == 8
    assert set(whole["errors"].values()) == {0.0}
    by_fit = {tuple(one["fit"][:2]): one["errors"] for one in others}
    # Each is best in what it minimises.
    assert by_fit["gauge", "text"]["read"] == min(one["read"] for one in by_fit.values())
    assert by_fit["alternating", "weights"]["weights"] < by_fit["alternating", "text"]["weights"]
    *_, last, correlations = predicting.table([whole, *others]).splitlines()
    more = others[-1]["loss"]["own"] - whole["loss"]["own"]
    assert last.split()[1:7:2] == ["gauge", "text", "2"] and f"{more:+.3f}" in last
    assert "nan" not in correlations
    *_, row = predicting.widths(seen, [16]).splitlines()
    _, one, best, least, most = row.strip("|").split("|")
    assert float(best) <= float(one) and int(least) <= 16 <= int(most)
    # One width's error is what a conversion to it reports.
    convert(
        tmp_path / "run", tmp_path / "new", ["attention=mla", "attention.latent=16"],
        tokens=64, heldout=16, context=16,
    )  # fmt: skip
    layers = json.loads((tmp_path / "new/conversion.json").read_text())["layers"]
    predicted = [BALANCE**2 * each["key_error"] + each["value_error"] for each in layers]
    assert sum(predicted) / len(predicted) == pytest.approx(float(one), abs=1e-4)
