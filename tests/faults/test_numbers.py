"""A batch whose gradients are no numbers costs one step; many in a row stop the run, explained."""

import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from lrkv_jax.data.loader import make_loader
from lrkv_jax.errors import LrkvError
from lrkv_jax.training import step as step_module
from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.loop import train
from lrkv_jax.training.metrics import read_metrics

pytestmark = pytest.mark.faults

MESH = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")


def test_a_nan_batch_costs_its_step_and_many_in_a_row_stop_the_run(tiny, monkeypatch):
    saves = "train.save_every=1", "train.max_checkpoints=9"
    config = tiny(*MESH, *saves, "guard.stop_after=3", "attention=lrkv", "train.steps=20",
                  "optimizer.warmup_steps=15")  # fmt: skip
    loader = make_loader(config.data, config.train.seq_len, config.train.global_batch_size)
    first_rows = jnp.asarray(np.stack([loader.batch_at(step)[0] for step in (2, 5, 6, 7)]))
    honest = step_module.make_gradient

    def poisoned(*arguments):
        gradient = honest(*arguments)

        def run(params, tokens_BU, teacher):
            value, grads = gradient(params, tokens_BU, teacher)
            bad = jnp.any(jnp.all(first_rows == tokens_BU[0], axis=1))
            leaves, tree = jax.tree.flatten(grads)
            leaves[-1] = leaves[-1] + jnp.where(bad, jnp.nan, 0.0)  # the head's
            return value, jax.tree.unflatten(tree, leaves)

        return run

    monkeypatch.setattr(step_module, "make_gradient", poisoned)
    console = Console(file=io.StringIO(), width=400)
    with pytest.raises(LrkvError, match="3 steps in a row were skipped, up to step 8") as error:
        train(config, console=console)
    assert "\n" not in str(error.value)
    rows = read_metrics(config.directory)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["skipped"] for row in rows] == [0, 0, 1, 1, 1, 2, 3, 4]
    assert rows[2]["grad_norm"] is None and rows[2]["skipped_in_a_row"] == 1
    assert all(row["grad_norm"] > 0 for row in rows if row["step"] in (1, 2, 4, 5))
    lines = [line for line in console.file.getvalue().splitlines() if "SKIPPED" in line]
    records = loader.records_of(2)
    assert len(lines) == 4 and lines[0].startswith("STEP 3 SKIPPED, not finite: loss ")
    assert "gradient norm nan" in lines[0]
    assert f"batch {rows[2]['batch']} of records {records[0]}, {records[1]}" in lines[0]
    with Checkpointer(Path(config.directory, "checkpoints")) as checkpoints:
        before, after = (checkpoints.manifest(step)["arrays"] for step in (2, 3))
    changed = {name for name, array in before.items() if after[name] != array}
    assert changed and all(name.startswith("run/") for name in changed), "weights moved"
    # The schedule, too, goes on from where it was.
    rates = [row["lr_matrix"] for row in rows]
    assert rates[1] < rates[2] == rates[3] < rates[4]
    # Started again, it is not taken for well: the count goes on from the checkpoint.
    lower = config.optimizer.model_copy(update={"matrix_lr": 0.001})
    config = config.model_copy(update={"optimizer": lower})
    (allow,) = re.findall(r"lower learning rates and --allow-change (\S+)$", str(error.value))
    with pytest.raises(LrkvError, match="steps in a row were skipped"):
        train(config, console=console, allow=[allow])
