"""Each sampling rule keeps the tokens it should and draws them as often as it should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lrkv_jax.decode import Sampling
from lrkv_jax.decode.sampling import sample
from lrkv_jax.errors import LrkvError

P_V = np.array([0.05, 0.4, 0.02, 0.25, 0.18, 0.1])
DRAWS = 20_000


def drawn(how):
    """Frequencies of the six tokens over many keys."""
    logits_BV = jnp.broadcast_to(jnp.log(P_V), (DRAWS, len(P_V)))
    keys_B = jax.random.split(jax.random.key(0), DRAWS)
    tokens_B = np.asarray(sample(logits_BV, keys_B, how))
    return np.bincount(tokens_B, minlength=len(P_V)) / DRAWS


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
    ],
)
def test_tokens_are_drawn_from_the_kept_ones_in_proportion(how, kept, power):
    expected = np.where(np.isin(np.arange(len(P_V)), kept), P_V**power, 0)
    expected /= expected.sum()
    # Four standard deviations of a binomial frequency.
    spread = 4 * np.sqrt(expected * (1 - expected) / DRAWS)
    assert (abs(drawn(how) - expected) <= spread).all()


def test_temperature_zero_is_the_likeliest_token():
    assert drawn(Sampling(0.0, top_k=3, top_p=0.2))[1] == 1.0


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("kept", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_a_temperature_near_zero_draws_the_likeliest_token(temperature, kept):
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
    ],
)
def test_impossible_settings_are_refused(how):
    with pytest.raises(LrkvError, match=next(iter(how))):
        Sampling(**how)
