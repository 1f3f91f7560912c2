"""Each sampling rule keeps the tokens it should and draws them as often as it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.errors import LrkvError
from lrkv_jax.inference import Sampling
from lrkv_jax.inference.calls import batched_params as of_sequences
from lrkv_jax.inference.request import Request, RngStream, Sequence
from lrkv_jax.inference.sampling import sample

P_V = np.array([0.05, 0.4, 0.02, 0.25, 0.18, 0.1])
DRAWS = 20_000


def drawn(how):
    """Frequencies of the six tokens over many keys."""
    logits_BV = jnp.broadcast_to(jnp.log(P_V), (DRAWS, len(P_V)))
    keys_B = jax.random.split(jax.random.key(0), DRAWS)
    choice = jax.tree.map(jnp.asarray, params_of([how])).of_slots(jnp.zeros(DRAWS, int))
    tokens_B = np.asarray(sample(logits_BV, keys_B, choice))
    return np.bincount(tokens_B, minlength=len(P_V)) / DRAWS


def params_of(ways):
    """Parameters of slots that sample in these ways."""
    return of_sequences([Sequence.of(Request([1], 2, sampling=how)) for how in ways])


def test_each_row_chooses_by_its_own_rule_as_if_it_were_alone():
    ways = [Sampling(), Sampling(1.0), Sampling(0.7, top_k=3), Sampling(1.3, top_p=0.6)]
    ways += [Sampling(0.9, 4, 0.8), Sampling(1.0, top_k=99)]
    keys_B = jax.random.split(jax.random.key(1), len(ways))
    logits_BV = jax.random.normal(jax.random.key(2), (len(ways), 50))
    together = np.asarray(sample(logits_BV, keys_B, params_of(ways)))
    for row, how in enumerate(ways):
        own = slice(row, row + 1)
        alone = sample(logits_BV[own], keys_B[own], params_of([how]))
        assert int(alone[0]) == together[row]


def test_a_requests_way_of_choosing_reaches_its_row():
    request = Request(
        [1],
        2,
        sampling=Sampling(0.5, 3, 0.75),
        rng=RngStream(7, 9),
        stop_token_ids=frozenset([4, 2]),
    )
    choice = of_sequences([None, Sequence.of(request)])
    assert (choice.temperature_B.tolist(), choice.top_k_B.tolist()) == ([0, 0.5], [0, 3])
    assert (choice.top_p_B.tolist(), choice.stream_B.tolist()) == ([1, 0.75], [0, 9])
    assert choice.seed_B2[1].tolist() == jax.random.key_data(jax.random.key(7)).tolist()
    assert choice.stopped_by(jnp.array([2, 2])).tolist() == [False, True]


@pytest.mark.parametrize(
    ("how", "kept", "power"),
    [
        (Sampling(1.0), [0, 1, 2, 3, 4, 5], 1.0),
        (Sampling(0.5), [0, 1, 2, 3, 4, 5], 2.0),
        (Sampling(1.0, top_k=2), [1, 3], 1.0),
        (Sampling(1.0, top_k=99), [0, 1, 2, 3, 4, 5], 1.0),
        (Sampling(1.0, top_p=0.6), [1, 3], 1.0),  # 0.4 is short of 0.6, 0.65 is not
        (Sampling(1.0, top_p=0.7), [1, 3, 4], 1.0),
        (Sampling(1.0, top_p=0.01), [1], 1.0),
        (Sampling(2.0, top_k=4, top_p=0.5), [1, 3], 0.5),
        (Sampling(1.0, min_p=0.4), [1, 3, 4], 1.0),  # of 0.4
        (Sampling(1.0, top_k=5, min_p=0.3), [1, 3, 4], 1.0),
    ],
)
def test_tokens_are_drawn_from_the_kept_ones_in_proportion(how, kept, power):
    expected = np.where(np.isin(np.arange(len(P_V)), kept), P_V**power, 0)
    expected /= expected.sum()
    # Four standard deviations of a binomial frequency.
    spread = 4 * np.sqrt(expected * (1 - expected) / DRAWS)
    assert (abs(drawn(how) - expected) <= spread).all()


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-38, 5e-324])
@pytest.mark.parametrize("kept", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_temperature_zero_or_near_it_draws_the_likeliest_token(temperature, kept):
    """Below 1e-37 it counted as 0, and others were drawn (A21)."""
    assert drawn(Sampling(temperature, **kept))[1] == 1.0


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"frequency_penalty": float("inf")},
        {"bias": {1: float("nan")}},
    ],
)
def test_impossible_settings_are_refused(how):
    with pytest.raises(LrkvError, match=next(iter(how))):
        Sampling(**how)
