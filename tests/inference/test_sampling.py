"""Each sampling rule keeps the tokens it should and draws them as often as it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Sampling
from lrkv_jax.inference.calls import batched_params
from lrkv_jax.inference.request import Request, RngStream, Sequence
from lrkv_jax.inference.sampling import sample

P_V = np.array([0.05, 0.4, 0.02, 0.25, 0.18, 0.1])
DRAWS = 20_000
EVERY = [0, 1, 2, 3, 4, 5]
# How a row draws, the tokens that it keeps, and the power of P_V that it draws them by.
RULES = [
    (Sampling(1.0), EVERY, 1.0),
    (Sampling(0.5), EVERY, 2.0),
    (Sampling(1.0, top_k=2), [1, 3], 1.0),
    (Sampling(1.0, top_k=99), EVERY, 1.0),
    (Sampling(1.0, top_p=0.6), [1, 3], 1.0),  # 0.4 is short of 0.6, 0.65 is not
    (Sampling(1.0, top_p=0.7), [1, 3, 4], 1.0),
    (Sampling(1.0, top_p=0.01), [1], 1.0),
    (Sampling(2.0, top_k=4, top_p=0.5), [1, 3], 0.5),
    (Sampling(1.0, min_p=0.4), [1, 3, 4], 1.0),  # of 0.4
    (Sampling(1.0, top_k=5, min_p=0.3), [1, 3, 4], 1.0),
    # Below 1e-37 a temperature counted as 0, and others were drawn.
    *((Sampling(t, **kept), [1], 1.0) for t in (0.0, 1e-38, 5e-324)
      for kept in ({}, {"top_k": 3}, {"top_p": 0.9})),
]  # fmt: skip


def test_each_row_draws_the_tokens_that_it_keeps_in_proportion():
    """All rules in one batch, each over many keys."""
    ways = [Sequence.of(Request([1], 2, sampling=how)) for how, _, _ in RULES]
    rows = jnp.repeat(jnp.arange(len(RULES)), DRAWS)
    params = jax.tree.map(jnp.asarray, batched_params(ways)).of_slots(rows)
    logits_BV = jnp.broadcast_to(jnp.log(P_V), (len(rows), len(P_V)))
    tokens_B = np.asarray(sample(logits_BV, jax.random.split(jax.random.key(0), len(rows)), params))
    for (how, kept, power), drawn in zip(RULES, tokens_B.reshape(-1, DRAWS), strict=True):
        expected = np.where(np.isin(EVERY, kept), P_V**power, 0)
        expected /= expected.sum()
        # Four standard deviations of a binomial frequency.
        spread = 4 * np.sqrt(expected * (1 - expected) / DRAWS)
        found = np.bincount(drawn, minlength=len(P_V)) / DRAWS
        assert (abs(found - expected) <= spread).all(), how


def test_a_requests_way_of_choosing_reaches_its_row():
    how = {"sampling": Sampling(0.5, 3, 0.75), "rng": RngStream(7, 9)}
    request = Request([1], 2, stop_token_ids=frozenset([4, 2]), **how)
    choice = batched_params([None, Sequence.of(request)])
    assert (choice.temperature_B.tolist(), choice.top_k_B.tolist()) == ([0, 0.5], [0, 3])
    assert (choice.top_p_B.tolist(), choice.stream_B.tolist()) == ([1, 0.75], [0, 9])
    assert choice.seed_B2[1].tolist() == jax.random.key_data(jax.random.key(7)).tolist()
    assert choice.stopped_by(jnp.array([2, 2])).tolist() == [False, True]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0),
        ("top_p", 1.5), ("min_p", -0.1), ("frequency_penalty", float("inf")),
        ("bias", {1: float("nan")}),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(name, value):
    with pytest.raises(LrkvError, match=name):
        Sampling(**{name: value})
