"""A tiny comparison of serving from end to end."""

import json
import math

import numpy as np
import pytest

from lrkv_jax.lab.bench.report import save
from lrkv_jax.lab.bench.serve import ServeBenchmark, random_trace, run, tables


def test_the_file_of_a_report_is_json_where_an_error_has_no_bound(tmp_path):
    wrong = {"benchmark": "decode", "backend": "cpu", "rows": [], "error": math.inf}
    found = json.loads(save(wrong, tmp_path).read_text(), parse_constant=pytest.fail)
    assert found["error"] is None


@pytest.mark.slow
def test_every_ratio_is_measured_within_one_run(tmp_path):
    small = "model.layers=1", "model.unroll=1", "model.width=48", "model.vocabulary=1024"
    report = run(ServeBenchmark(context=256, requests=8, samples=1, overrides=small))
    running, *_ = report["rows"]
    assert running.what == "texts running" and running.ratio > 1
    for row in report["rows"]:
        assert 0 < row.least <= row.ratio <= row.most
    assert len(json.loads(save(report, tmp_path).read_text())["rows"]) == 4
    text = tables(report)
    assert max(map(len, text.splitlines()[1:])) <= 80 and "lrkv_latent over mha" in text
    lengths = np.array([(len(prompt), new) for prompt, new in random_trace(200, 256)])
    assert lengths.min() >= 1 and lengths.max() == 128
