"""Finished runs that were never trained: their curves and scores are planted."""

from pathlib import Path

import numpy as np

from lrkv_jax.config import load_config
from lrkv_jax.lab.report.comparison.runs import RunRecord
from lrkv_jax.models.accounting.counts import training_flops_per_token

HELDOUT = 4096  # tokens that each validation was measured on


def planted(
    attention, losses, *, seed=0, scale="nano", steps=None, settings=(), evaluation=None, path=None
):
    """A run whose validations are `losses`, nats a token, at equal steps; bits a byte are a third.

    It has trained for `steps`, by default as many as its configuration has.
    """
    config = load_config(scale, [f"attention={attention}", f"train.seed={seed}",
                                 f"data.shuffle_seed={seed}", *settings])  # fmt: skip
    steps = steps or config.train.total_steps
    batch = config.train.global_batch_size * config.train.seq_len
    cost = training_flops_per_token(config.model, config.train.seq_len)
    rows = [
        {
            "step": int(step), "tokens": int(step) * batch, "flops": int(step) * batch * cost,
            "validation_loss": loss, "validation_bpb": loss / 3, "validation_tokens": HELDOUT,
        }
        for step, loss in zip(np.linspace(0, steps, len(losses) + 1)[1:], losses, strict=True)
    ]  # fmt: skip
    path = path or Path(f"/planted/{scale}/{attention}-seed{seed}")
    return RunRecord(Path(path), config, tuple(rows), evaluation, None)
