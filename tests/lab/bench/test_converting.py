"""The curve of conversions: every stage is measured once, and what is cut short goes on."""

import pytest
from support.command import lrkv
from support.planted_models import LLAMA, plant
from support.tiny import few_pages

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_device")]

HEALING = (
    "train.steps=2", "train.global_batch_size=8", "train.seq_len=16", "train.save_every=1",
    "optimizer.warmup_steps=1", "optimizer.constant=0",
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
    forms = ["attention=mla attention.kv_lora_rank=24", "attention=lrkv attention.rank=3"]
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
