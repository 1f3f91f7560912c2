"""Does cached decoding agree with the whole-sequence forward, on real text?

B sequences  T positions  N decoded tokens of each  V vocabulary
"""

import logging
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax.inference import Engine
from lrkv_jax.inference.trained_run import TrainedRun
from lrkv_jax.models.layers import resolve_dtype

_log = logging.getLogger("lrkv_jax.evaluation")

# A few roundings of float32: a model that has learnt little has many tokens this close.
TIE = 1e-6
# The longest prompt is prefilled in this many pieces: the first attends to itself, the
# next ones to the cache.
PIECES = 3
ROWS, STEPS = 4, 64  # of a run's comparison


@dataclass(frozen=True)
class Agreement:
    """How closely decoding agrees with the forward, over `positions` predicted tokens.

    `max_relative_error` is the largest difference of a logit over the largest logit;
    `same_greedy_token` the share of positions whose likeliest token is the same, or
    ties with the forward's to within TIE of the largest logit; `loss` the mean nats of
    the text's tokens by decoding, and `forward_loss` by the forward. An error above `bound` is more
    than rounding explains.
    """

    max_relative_error: float
    bound: float
    same_greedy_token: float
    positions: int
    loss: float
    forward_loss: float


def decode_agreement(run: TrainedRun, tokens_BT: np.ndarray) -> Agreement:
    """Compare logits on a text: prompts of different lengths, then `STEPS` tokens or half of it.

    The engine's programs decode: a ragged prefill in pieces, then several steps a
    call with a donated cache, fed the text's tokens instead of sampled ones.
    """
    tokens_BT = tokens_BT[:, : 4 * STEPS]
    B, T = tokens_BT.shape
    longest = T - min(STEPS, T // 2)
    lengths_B = [max(1, longest - 17 * row) for row in range(B)]
    engine = Engine(run, batch=B, length=T, prefill_chunk=-(-longest // PIECES))
    prompts = [row[:n].tolist() for row, n in zip(tokens_BT, lengths_B, strict=True)]
    # Logits at position t choose token t + 1.
    places_BN = np.array(lengths_B)[:, None] + np.arange(T - longest)
    rows_B1 = np.arange(B)[:, None]
    next_BN = tokens_BT[rows_B1, places_BN]
    cached_BNV = engine.forced_logits(prompts, next_BN.tolist())
    forward_BNV = np.asarray(run.model(jnp.asarray(tokens_BT)))[rows_B1, places_BN - 1]
    chosen_BN1 = cached_BNV.argmax(-1)[..., None]
    behind_BN = forward_BNV.max(-1) - np.take_along_axis(forward_BNV, chosen_BN1, -1)[..., 0]
    largest = float(np.abs(forward_BNV).max())
    error, bound = float(np.abs(cached_BNV - forward_BNV).max()) / largest, _bound(run.config.model)
    if not error <= bound:
        _log.warning(
            "decoding differs from the whole-sequence forward by %.1e, and rounding explains %.0e: "
            "see what a layer must keep, in docs/new_variant.md", error, bound,
        )  # fmt: skip
    return Agreement(
        max_relative_error=error,
        bound=bound,
        same_greedy_token=float((behind_BN <= TIE * largest).mean()),
        positions=places_BN.size,
        loss=_loss(cached_BNV, next_BN),
        forward_loss=_loss(forward_BNV, next_BN),
    )


def _loss(logits_BNV, next_BN):
    log_p_BNV = jax.nn.log_softmax(jnp.asarray(logits_BNV, jnp.float32))
    return -float(np.take_along_axis(np.asarray(log_p_BNV), next_BN[..., None], -1).mean())


def _bound(model):
    """The largest error by rounding: what is promised in float32, or what bfloat16 may do.

    On random weights of 2 to 24 layers bfloat16 gave a third of it. Int8 rows round no coarser, nor
    does TF32, in which a GPU multiplies float32.
    """
    exact = model.kv_cache_dtype == "auto" and jax.default_backend() == "cpu"
    exact &= resolve_dtype(model.dtype) == jnp.float32
    return 1e-5 if exact else 2.0**-6 * model.layers**0.5
