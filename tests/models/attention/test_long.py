"""Decoding at the far end of a long context, against the training form of the same layer.

B batch  S cache slots  D model width  H heads  G key/value heads  N = H / G
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.variants import ALL, WIDTH, random_model, small

from lrkv_jax.models.attention.cache import write

SLOW = "mha", "mla-full", "lrkv-shared-odd_rank", "lrkv-latent-even_rank"


@pytest.mark.parametrize(
    "name",
    ["mla", "lrkv-full-odd_rank", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)],
)
def test_decode_equals_forward_at_the_end_of_a_long_context(name):
    """The last token's heads from the cache and from what trains, within 2e-6 of the values'.

    Of the forward, softmax and averages are float64's: those of float32 over so many would be less
    exact than what is measured. A few tokens of six times the size are most of what is seen: of an
    average over all, the errors of angles cancel.
    """
    length = 131_072
    config = small(ALL[name], layers=1, qk_norm=False)
    layer = random_model(config).blocks[0].attention
    rng = np.random.default_rng(0)
    x_1SD = np.float32(0.3 * rng.standard_normal((1, length, WIDTH)))
    x_1SD[:, -1] *= 6
    x_1SD[:, rng.integers(0, length, 20)] *= 6
    positions_1S = jnp.arange(length)[None]

    @jax.jit
    def both(layer, x_1SD):
        new = layer.new_kv(x_1SD, positions_1S)
        cache = write(layer.init_cache(1, length, jnp.float32), new, positions_1S, None)
        last = x_1SD[:, -1:], positions_1S[:, -1:]
        query, angles = layer.queries(*last), layer.slot_angles(length)
        decoded_11HK, _ = layer.attend_cached(query, cache, last[1], angles)
        return decoded_11HK, layer.attend_full(x_1SD, positions_1S, lambda *qkv: qkv)

    decoded_11HK, qkv = both(layer, x_1SD)
    q_1SHW, k_1SGW, v_1SGK = map(np.float64, qkv)
    truth_HK = attend_last(q_1SHW, k_1SGW, v_1SGK, layer.scale)
    sizes_HK = attend_last(q_1SHW, k_1SGW, np.abs(v_1SGK), layer.scale)
    error = np.abs(decoded_11HK[0, 0] - truth_HK).max() / sizes_HK.max()
    assert error <= 2e-6


def attend_last(q_1SHW, k_1SGW, v_1SGK, scale):
    """The last query's attention over all keys."""
    q_HW, G = q_1SHW[0, -1], k_1SGW.shape[2]
    logits_GNS = scale * np.einsum("GNW,SGW->GNS", q_HW.reshape(G, -1, q_HW.shape[-1]), k_1SGW[0])
    weights_GNS = np.exp(logits_GNS - logits_GNS.max(-1, keepdims=True))
    weights_GNS /= weights_GNS.sum(-1, keepdims=True)
    return np.einsum("GNS,SGK->GNK", weights_GNS, v_1SGK[0]).reshape(len(q_HW), -1)
