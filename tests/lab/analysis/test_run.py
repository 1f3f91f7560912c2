"""A run's analysis: whole, readable by others, and about the step that was asked for."""

import json

import jax
import numpy as np
import pytest
from support.tiny import TINY
from support.variants import random_params

from lrkv_jax.config import load_config
from lrkv_jax.data.loader import Records
from lrkv_jax.data.records.build import build_dataset
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.analysis import analyze, head_diversity
from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.run_dir import open_run

pytestmark = pytest.mark.slow  # checkpoints are written, read and fingerprinted


@pytest.fixture(scope="module")
def run(tmp_path_factory, pages):
    """An LRKV run of two steps whose parameters are random, the second's queries all one head."""
    directory = tmp_path_factory.mktemp("runs") / "lrkv"
    config = load_config("configs/quickstart.yaml", [*TINY, *pages, f"run_dir={directory}"])
    open_run(config)
    params = random_params(config.model)
    alike = jax.tree.map(np.array, params)
    attention = alike["blocks"]["attention"]
    attention["query"][:] = attention["query"][:, :, :1]
    attention["key_up"][:] = 0
    with Checkpointer(directory / "checkpoints", max_to_keep=9) as checkpoints:
        for step, tree in ((3, params), (5, jax.tree.map(jax.numpy.asarray, alike))):
            checkpoints.save(step, {"params": tree}, {})
            checkpoints.wait()
    return directory, config, {3: params, 5: alike}


def test_the_newest_step_s_heads_are_seen_to_be_alike_and_json_says_so(run):
    """Equal queries and no key residuals: one form. The values' residuals are still there."""
    directory, config, _ = run
    newest = analyze(directory, null_seeds=2, ranks=(0, 3), batches=99)
    assert json.loads((directory / "analysis.json").read_text()) == newest
    assert not list(directory.glob("*.tmp"))
    json.dumps(newest, allow_nan=False)  # every number is finite
    assert newest["kind"] == "lrkv" and newest["variant"] == "lrkv_latent" and newest["rank"] == 4
    assert newest["settings"] == config.model.model_dump(mode="json")
    assert newest["step"] == 5
    found, values = newest["query_key"], newest["value_output"]
    assert found["mean"]["uncentred"]["effective_rank"] == pytest.approx(1)
    assert found["mean"]["centred"]["effective_rank"] == 0
    assert found["mean"]["mean_off_diagonal"] == pytest.approx(1)
    assert values["mean"]["centred"]["percent_of_cap"] > 50
    assert found["null"]["mean"]["centred"]["percent_of_cap"] > 95
    assert found["null"]["draws"] == 2

    assert newest["geometry"]["mean"]["key"]["mean_cosine"] == 0
    assert newest["magnitude"]["mean"]["key"]["residual"] == 0
    assert [fit["rank"] for fit in newest["factorisation"]] == [0, 3]
    for fit in newest["factorisation"]:
        assert fit["mean"]["key"]["mean_svd"]["error"] < 1e-6
    assert newest["factorisation"][0]["mean"]["value"]["mean_svd"]["error"] > 0.1
    on_text, logits = newest["weighted"], newest["logits"]
    records = len(Records(build_dataset(config.data, 32), "heldout"))
    assert records % 8 and on_text["tokens"] == logits["tokens"] == records * 32  # no padding
    assert set(on_text) - {"tokens"} == {"query_key", "value_output"}
    assert on_text["query_key"]["mean"]["uncentred"]["effective_rank"] == pytest.approx(1)
    assert on_text["value_output"]["mean"] != values["mean"]

    for layer in logits["per_layer"]:  # heads of one query and one key have one logit
        np.testing.assert_allclose(layer["gram"], np.ones((4, 4)), atol=1e-5)
    assert logits["mean"]["mean_off_diagonal"] == pytest.approx(1, abs=1e-5)


def test_another_step_is_analysed_when_it_is_asked_for_and_no_other_run_or_rank(run, tmp_path):
    directory, config, params = run
    found = analyze(directory, step=3, null_seeds=1)
    expected = head_diversity(config.model, params[3])
    assert found["step"] == 3
    assert [fit["rank"] for fit in found["factorisation"]] == [4]  # LRKV's own
    for kind, layers in expected.items():
        for written, layer in zip(found[kind]["per_layer"], layers, strict=True):
            np.testing.assert_array_equal(written["gram"], layer.gram_HH)
    with pytest.raises(LrkvError, match="is not a run"):
        analyze(tmp_path)
    with pytest.raises(LrkvError, match="rank = 9 of matrices 32 × 8: use 0 to 8"):
        analyze(directory, ranks=(9,))
