"""The softmax that every cached decode path shares."""

import jax
import jax.numpy as jnp

MASKED = -1e30


def cached_softmax(logits_BHTS, positions_BT):
    """Float32 softmax over the slots s ≤ position: slot s holds the token at position s.

    Slots past a sequence's position hold nothing yet, or another sequence's leftovers: they get
    weight exactly 0. logits [B, ..., T, S] may carry any head axes between B and T.
    """
    T, S = logits_BHTS.shape[-2:]
    seen_BTS = jnp.arange(S) <= positions_BT[:, :, None]
    seen = seen_BTS.reshape(-1, *[1] * (logits_BHTS.ndim - 3), T, S)
    return jax.nn.softmax(jnp.where(seen, logits_BHTS.astype(jnp.float32), MASKED), axis=-1)
