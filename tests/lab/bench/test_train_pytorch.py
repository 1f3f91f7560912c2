"""The comparison with PyTorch: what it refuses, and what it says of the other process."""

import json
import math
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.tiny import TINY

from lrkv_jax.config import load_config
from lrkv_jax.errors import LrkvError

SHAPE = [text for text in TINY if not text.startswith("variants.")]


@pytest.fixture
def compare(experiment):
    return experiment("compare_pytorch")


def side(*losses, grad_norm=2.0):
    """A side that takes one step and then three."""
    answers = iter([{"loss": losses[:1], "grad_norm": grad_norm}, {"loss": losses[1:]}])
    return SimpleNamespace(steps=lambda count: next(answers))


def test_two_sides_must_be_one_function(compare):
    same = (8.0, 7.9, 7.8, 7.7)
    found = compare._check("mha", side(*same), side(8.0, 7.9, 7.8001, 7.7))
    assert found["loss"] == found["grad_norm"] == 0
    assert found["loss_of_4_steps"] == pytest.approx(1e-4 / 7.8, rel=1e-3)
    for other, name in (
        (side(8.01, 7.9, 7.8, 7.7), "loss differs by 1.2e-03"),
        (side(*same, grad_norm=2.001), "grad_norm differs by 5.0e-04"),
        (side(8.0, 7.9, 7.8, 7.6), "loss_of_4_steps differs by 1.3e-02"),
        (side(math.nan, 7.9, 7.8, 7.7), "loss differs by nan"),
    ):
        with pytest.raises(LrkvError, match=name):
            compare._check("mha", side(*same), other)


@pytest.mark.slow
def test_our_side_trains_from_parameters_of_which_none_is_zero(compare):
    """A14: the state was built without the guard's part, and the first comparison raised."""
    overrides = ("attention=mha", "model.vocabulary=64", "optimizer.muon.iterations=1")
    config = load_config("quickstart", [*overrides, *SHAPE])
    batches = np.random.default_rng(0).integers(0, 64, (2, 8, 33), np.int32)
    ours = compare.Ours(config, batches)
    first, more = ours.steps(1), ours.steps(2)
    assert first["loss"][0] > math.log(64) + 0.01  # a head of zeros would say ln 64
    assert len(more["loss"]) == 2 and np.isfinite([*more["loss"], more["grad_norm"]]).all()


def test_both_sides_start_with_the_same_arrays_none_of_them_zero(compare):
    config = load_config("quickstart", ["model.layers=2", "model.unroll=2"])
    params = {
        "blocks": {"output": jax.numpy.zeros((2, 4, 32, 128)), "query": jax.numpy.ones((2, 3))},
        "head": {"kernel": jax.numpy.zeros((128, 64))},
    }
    filled = compare._without_zeros(params)
    assert all(np.all(leaf) for leaf in jax.tree.leaves(filled))
    np.testing.assert_array_equal(filled["blocks"]["query"], 1)
    for leaf in (filled["blocks"]["output"], filled["head"]["kernel"]):
        assert np.std(leaf) == pytest.approx(128**-0.5, rel=0.05)  # 4 · 32 = 128 inputs
    order = compare._order(config, "P", "T")
    assert order["model"]["feed_forward"] == 512 and order["model"]["context"] == 256
    assert order["optimizer"]["momentum"] == 0.95 and order["optimizer"]["clip"] == 1.0
    json.dumps(order)


def test_an_interpreter_without_pytorch_is_named_in_one_line(compare, tmp_path):
    with pytest.raises(LrkvError, match="no/python does not start .No such file"):
        compare.check_interpreter("no/python")
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch here')")
    (tmp_path / "python").write_text(f'#!/bin/sh\ncd {tmp_path} && exec {sys.executable} "$@"')
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(LrkvError, match="cannot be used .ModuleNotFoundError: no torch") as error:
        compare.check_interpreter(str(tmp_path / "python"))
    assert "\n" not in str(error.value)


def test_the_other_process_answers_line_by_line_and_its_end_is_reported(compare, tmp_path):
    code = """
import json, sys
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "steps" and order["count"] > 5:
        sys.exit("out of memory")
    print(json.dumps({"threads": sys.argv[2], "got": order}), flush=True)
"""
    (tmp_path / "peer.py").write_text(code)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/peer.py "$@"')
    python.chmod(0o755)
    peer = compare.Theirs(str(python), 2, {"model": {"width": 8}})
    assert peer.versions == {"threads": "2", "got": {"do": "load", "model": {"width": 8}}}
    assert peer.steps(3)["got"] == {"do": "steps", "count": 3}
    with pytest.raises(LrkvError, match=f"{python} stopped: out of memory"):
        peer.steps(6)


def test_the_pages_table_has_both_allocators(compare, tmp_path):
    for keep, suffix in ((True, "-keep-memory"), (False, "")):
        row = {
            "variant": "lrkv", "tokens_per_step": 1000, "threads": 2, "pytorch": "2.13.0",
            "seconds_per_step": {"lrkv_jax": {"median": 0.5}, "pytorch": {"median": 1.0}},
            "throughput_over_pytorch": {
                "median": 2.0, "first_quartile": 1.9, "third_quartile": 2.1,
            },
        }  # fmt: skip
        report = {
            "device": "a CPU", "versions": {"jax": "0"}, "date": "2026-11-21T12", "rows": [row],
            "load_average": 0.1, "settings": {"keep_memory": keep, "rounds": 9, "burst": 2},
        }  # fmt: skip
        (tmp_path / f"torch_cpu{suffix}.json").write_text(json.dumps(report))
    table = compare.page_table(tmp_path)
    first, second = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if "| lrkv " in line
    ]
    assert first == ["as it starts", "lrkv", "2,000", "1,000", "2.00", "1.90 to 2.10"]
    assert second[:2] == ["keeps memory", "lrkv"]
    assert f"<!-- {compare.BLOCK} -->" in compare.PAGE.read_text()
