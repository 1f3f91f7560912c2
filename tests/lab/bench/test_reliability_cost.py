"""What the guarantees cost, measured on a model of next to nothing."""

import json
import sys

import pytest

TINY = ["model.layers=1", "model.unroll=1", "model.width=16", "model.heads=2", "model.head_width=8",
        "model.vocabulary=64", "train.context=16", "train.batch=2"]  # fmt: skip


@pytest.mark.slow
def test_every_cost_is_measured_and_adds_up(experiment, monkeypatch, tmp_path):
    """The script runs, and swaps no function of the package for another (A14)."""
    out = tmp_path / "cost.json"
    monkeypatch.setattr(
        sys, "argv", ["it", *TINY, "--steps", "3", "--saves", "3", "--out", str(out)]
    )
    experiment("reliability_cost").main()
    report = json.loads(out.read_text())
    for pair in ("save", "restore"):
        assert min(report[pair][pair], report[pair][f"{pair}_orbax"], report[pair]["ratio"]) > 0
    pieces = report["pieces"]
    assert set(pieces) == {"fingerprints", "seal", "manifest"} and min(pieces.values()) > 0
    assert report["pieces_of_save"] == sum(pieces.values()) / report["save"]["save_orbax"]
    assert report["step"] > 0 and report["update"]["bare"] > 0
    assert report["guard_of_step"] == report["update"]["difference"] / report["step"]
