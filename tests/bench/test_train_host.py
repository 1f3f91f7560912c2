"""What a step costs the host: the loop around a model that computes next to nothing."""

import jax
import pytest

from lrkv_jax.bench import host
from lrkv_jax.config import load_config
from lrkv_jax.sharding import make_mesh
from lrkv_jax.train.state import abstract_state


def test_the_shrunk_model_is_the_128m_tree(tmp_path):
    mesh = make_mesh(load_config("quickstart").mesh, jax.devices()[:1])
    real = abstract_state(load_config("128m", ["attention=lrkv"]), mesh)
    shrunk = abstract_state(host.shrunk("128m", str(tmp_path)), mesh)
    assert jax.tree.structure(real) == jax.tree.structure(shrunk)
    for path, leaf in jax.tree.leaves_with_path(shrunk.params["blocks"]):
        assert leaf.shape[0] == 12 and leaf.size < 2000, path
    assert max(leaf.size for leaf in jax.tree.leaves(shrunk.params)) == 4096 * 8


def test_processor_time_is_noted_when_the_loop_asks_whether_to_stop():
    """A14: the benchmark found the loop's ticks by a word in its printed lines."""
    asked = host._Steps()
    with asked.hold(0) as held:
        assert [held.after(step) for step in (1, 2, 3)] == [False] * 3
    assert len(asked.seconds) == 3 and sorted(asked.seconds) == asked.seconds


@pytest.mark.slow
def test_the_loop_costs_the_host_little():
    """1 ms is what is promised, and what an idle machine shows; a busy one takes up to thrice."""
    loop = host.loop_overhead(steps=80)
    assert (loop["layers"], loop["steps"], loop["log_every"]) == (12, 80, 10)
    assert 0 < loop["ms_first_quartile"] <= loop["ms"] <= loop["ms_third_quartile"]
    assert 0 < loop["cpu_ms"] < 3


def test_reading_a_batch_is_timed_on_the_embedded_corpus():
    config = load_config("quickstart", ["train.context=128"])
    taken = host.batch_seconds(config, make_mesh(config.mesh), samples=4)
    assert len(taken) == 4 and all(0 < seconds < 1 for seconds in taken)


def test_without_the_data_libraries_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(host, "DATA_LIBRARIES", ("grain", "no_such_library"))
    assert not host.has_data_libraries()


@pytest.mark.parametrize("key", ["ms", "cpu_ms"])
def test_the_sentence_says_the_figures(key):
    from lrkv_jax.bench.train_table import loop_sentence

    loop = {
        "scale": "128m", "layers": 12, "arrays": 36, "ms": 0.81, "ms_first_quartile": 0.7,
        "ms_third_quartile": 0.9, "cpu_ms": 0.64,
    }  # fmt: skip
    assert f"{loop[key]:.2f} ms" in loop_sentence(loop)
