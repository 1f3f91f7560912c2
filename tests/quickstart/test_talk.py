"""What the README promises of the path from pretraining to a chat, run as it stands."""

import json
import os
import subprocess
import sys
import time

import pytest

ENVIRONMENT = {**os.environ, "XLA_FLAGS": "", "COLUMNS": "110"}
BENCHMARKS = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval")


@pytest.mark.timed
def test_pretraining_midtraining_evaluation_and_chat_take_less_than_eight_minutes(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    command = [sys.executable, "-m", "lrkv_jax", "quickstart", "--chat", "--run-model-code"]
    printed = subprocess.run(
        command, env=ENVIRONMENT, check=True, capture_output=True, text=True
    ).stdout
    print(printed)
    assert time.monotonic() - began < 480
    run = tmp_path / "runs/quickstart-midtrain-lrkv"
    summary = json.loads((run / "evaluation.json").read_text())
    assert summary["agreement"]["max_relative_error"] <= 1e-5
    scores = [summary[name]["score"] for name in BENCHMARKS]
    assert summary["combined"] == pytest.approx(sum(scores) / 5)
    for name in BENCHMARKS:
        (path,) = (run / "evaluations").glob(f"{name}-letters-step*.json")
        result = json.loads(path.read_text())
        assert len(result["records"]) == result["examples"] == result["dataset"]["examples"]
        assert result["dataset"]["demonstration"] and len(result["dataset"]["sha256"]) == 64
        assert {"settings", "versions", "seconds", "devices", "batch"} <= result.keys()
        assert f"{result['measure']}_stderr" in result["more"]
    assert "DEMONSTRATION SETS" in printed
    # Later turns bring their own tokens alone.
    assert (
        "(0 tokens were in the cache" in printed and printed.count("tokens were in the cache") == 3
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["validation_bpb"] < 1.5, "midtraining taught nothing"
