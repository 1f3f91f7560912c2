"""What the README promises of the quickstart, run as it stands."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from support.bigram import kneser_ney_bits_per_byte, token_stream

from lrkv_jax.config import load_config
from lrkv_jax.data.loader import make_loader
from lrkv_jax.evals import evaluate
from lrkv_jax.run.metrics import read_metrics

ENVIRONMENT = {**os.environ, "XLA_FLAGS": "", "COLUMNS": "110"}


def lrkv(*arguments):
    command = [sys.executable, "-m", "lrkv_jax", *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True)


@pytest.mark.timed
def test_quickstart_compares_two_good_models_in_four_minutes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    printed = lrkv("quickstart").stdout
    seconds = time.monotonic() - began
    print(printed)
    assert seconds < 240
    for name, share in (("mha", "100.0%"), ("lrkv", "53.1%")):
        assert f"{name}, decoded from its cache" in printed and share in printed
        result = evaluate(tmp_path / f"runs/quickstart-{name}")
        assert result["bpb"]["bits_per_byte"] <= 2.10
        assert result["agreement"]["max_relative_error"] <= 1e-5
        rows = read_metrics(tmp_path / f"runs/quickstart-{name}")
        # The first step compiles; the medians of the rest are the steady state.
        assert np.median([row["outside_step"] for row in rows[1:]]) <= 0.03


@pytest.mark.slow
def test_more_steps_beat_a_bigram_counted_on_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config("quickstart")
    context, data = config.train.context, config.data
    bigram = kneser_ney_bits_per_byte(
        token_stream(data, context, "train"),
        token_stream(data, context, "heldout"),
        make_loader(data, context, 1).token_bytes,
    )
    lrkv("train", "quickstart", "attention=lrkv", "train.steps=320")
    result = evaluate("runs/quickstart-lrkv", tasks=["bpb"])
    print(f"bigram {bigram:.4f}, LRKV after 320 steps {result['bpb']['bits_per_byte']:.4f}")
    assert result["bpb"]["bits_per_byte"] < bigram
