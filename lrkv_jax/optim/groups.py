"""The optimizer of a model: each weight's `spec.group` chooses its rule.

| group     | rule                          | learning rate | decay             |
|-----------|-------------------------------|---------------|-------------------|
| matrix    | Muon                          | matrix_lr     | matrix_decay      |
| embedding | AdamW                         | embedding_lr  | embedding_decay   |
| head      | AdamW                         | head_lr       | head_decay        |
| vector    | AdamW (gains and biases)      | head_lr       | none              |

Rank decides nothing: a 2-D embedding stays with AdamW, a 4-D stack of LRKV factors goes to Muon.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from lrkv_jax.config.schema import OptimizerConfig
from lrkv_jax.optim.muon import scale_by_muon
from lrkv_jax.optim.schedules import learning_rates, momentum_schedule


def make_optimizer(
    config: OptimizerConfig, specs: Any, total_steps: int, *, muon_dtype: DTypeLike
) -> optax.GradientTransformation:
    """Clip the whole gradient by its global norm, then update each group by its rule.

    `specs` is the tree of `WeightSpec` that mirrors the parameters; `muon_dtype` is that of the
    Newton–Schulz iterations. Decay is decoupled and scaled by the group's learning rate:
    w ← w − lr · (direction + decay · w).

    Raises LrkvError when the warm-up does not fit in `total_steps`.
    """
    rates = learning_rates(config, total_steps)

    def rate(group: str) -> optax.Schedule:
        return lambda step: rates(step)[group]

    def decayed(decay: float) -> optax.GradientTransformation:
        if not config.cautious_decay:
            return optax.add_decayed_weights(decay)
        return _cautious(optax.linear_schedule(decay, 0.0, max(total_steps - 1, 1)))

    def adamw(group: str, decay: float) -> optax.GradientTransformation:
        moments = optax.scale_by_adam(
            config.beta1, config.beta2, config.adam_eps, mu_dtype=config.moments_dtype
        )
        return optax.chain(moments, decayed(decay), optax.scale_by_learning_rate(rate(group)))

    muon = scale_by_muon(
        # optax hides the other groups' leaves behind MaskedNode; the specs follow.
        jax.tree.map(lambda s: s if s.group == "matrix" else optax.MaskedNode(), specs),
        momentum=momentum_schedule(config.muon),
        iterations=config.muon.iterations,
        dtype=muon_dtype,
        momentum_dtype=config.moments_dtype,
    )
    rules = {
        "matrix": optax.chain(
            muon,
            decayed(config.matrix_decay),
            optax.scale_by_learning_rate(rate("matrix")),
        ),
        "embedding": adamw("embedding", config.embedding_decay),
        "head": adamw("head", config.head_decay),
        "vector": adamw("head", 0.0),
        "still": optax.set_to_zero(),
    }
    rules = optax.partition(rules, jax.tree.map(lambda s: s.group, specs))
    clip = optax.identity() if config.grad_clip is None else _clip(config.grad_clip)
    return optax.chain(clip, rules)


def _cautious(decay: optax.Schedule) -> optax.GradientTransformation:
    """Add decay · w to a direction where it has w's sign or is 0."""
    everywhere = optax.add_decayed_weights(decay)

    def update(directions, state, params):
        decayed, state = everywhere.update(directions, state, params)
        choose = lambda d, w, both: jnp.where(d * w >= 0, both, d)  # noqa: E731
        return jax.tree.map(choose, directions, params, decayed), state

    return optax.GradientTransformation(everywhere.init, update)


def _clip(most: float) -> optax.GradientTransformation:
    """Scale the whole gradient so that its global norm is at most `most`."""

    def update(gradients, state, params=None):
        del params
        scale = jnp.minimum(1.0, most / jnp.maximum(optax.tree.norm(gradients), 1e-30))
        return jax.tree.map(lambda g: g * scale, gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
