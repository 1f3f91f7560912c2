"""Does cached decoding say what the whole-sequence forward says, on real text?

B sequences  T positions  V vocabulary
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lrkv_jax.config import ModelConfig
from lrkv_jax.model import with_parameters

# A few roundings of float32: a model that has learnt little has many tokens this close.
TIE = 1e-6


@dataclass(frozen=True)
class Agreement:
    """How far decoding is from the forward, over `positions` predicted tokens.

    `max_relative_error` is the largest difference of a logit over the largest logit;
    `same_greedy_token` the share of positions whose likeliest token is the same, or ties with the
    forward's to within TIE of the largest logit.
    """

    max_relative_error: float
    same_greedy_token: float
    positions: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def decode_agreement(
    config: ModelConfig, params: Any, tokens_BT: np.ndarray, prompt_lengths: list[int]
) -> Agreement:
    """Compare logits on `tokens_BT`, of which row i's first `prompt_lengths[i]` are its prompt.

    Prompts, ragged in one batch, are prefilled; the rest is fed token by token, through a jitted
    step with a donated cache.
    """
    model = with_parameters(config, params)
    full_BTV = np.asarray(jax.jit(lambda tokens: model(tokens))(jnp.asarray(tokens_BT)))
    graph, weights = nnx.split(model.unstacked())

    @partial(jax.jit, donate_argnums=2)
    def prefill(weights, tokens_BT, cache):
        return nnx.merge(graph, weights).prefill(tokens_BT, cache)[1]

    @partial(jax.jit, donate_argnums=2)
    def step(weights, token_B, cache, lengths_B):
        model = nnx.merge(graph, weights)
        x_B1D, cache = model.decode(token_B[:, None], cache, lengths_B)
        return model.logits(x_B1D)[:, 0], cache

    rows, length = np.arange(len(tokens_BT)), tokens_BT.shape[1]
    lengths_B = np.array(prompt_lengths)
    prompts_BT = np.where(np.arange(lengths_B.max()) < lengths_B[:, None],
                          tokens_BT[:, : lengths_B.max()], 0)  # fmt: skip
    cache = nnx.merge(graph, weights).init_cache(len(rows), length)
    cache = prefill(weights, jnp.asarray(prompts_BT), cache)
    worst, same, positions = 0.0, 0, 0
    largest = float(np.abs(full_BTV).max())
    for _ in range(length - lengths_B.max()):
        logits_BV, cache = step(weights, tokens_BT[rows, lengths_B], cache, lengths_B)
        logits_BV, expected_BV = np.asarray(logits_BV), full_BTV[rows, lengths_B]
        worst = max(worst, float(np.abs(logits_BV - expected_BV).max()))
        chosen_B = expected_BV[rows, logits_BV.argmax(-1)]
        same += int((expected_BV.max(-1) - chosen_B <= TIE * largest).sum())
        positions += len(rows)
        lengths_B = lengths_B + 1
    return Agreement(worst / largest, same / positions, positions)
