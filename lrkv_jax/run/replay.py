"""One step of a run again, from the newest checkpoint before it, and what was in it.

Writes nothing. On the same devices the numbers are those of the run, bit for bit.

B sequences  T positions  U = T + 1 tokens of a record
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from lrkv_jax.checkpoint import Checkpointer
from lrkv_jax.checkpoint.fingerprint import named
from lrkv_jax.config import RunConfig
from lrkv_jax.data.loader import Loader
from lrkv_jax.errors import LrkvError
from lrkv_jax.run.incidents import saved_batch
from lrkv_jax.run.metrics import read_metrics
from lrkv_jax.run.resume import compiling, resumed
from lrkv_jax.run.run_dir import find_run
from lrkv_jax.run.setup import Setup, mesh_of, with_data
from lrkv_jax.runtime.batches import as_argument, whole_on_devices
from lrkv_jax.runtime.processes import HERE, Processes
from lrkv_jax.sharding import replicated
from lrkv_jax.train.loss import make_gradient, make_loss
from lrkv_jax.train.state import TrainState, abstract_state, resolve

# Rows of the batch that are shown: those with the highest loss.
ROWS_SHOWN = 8


def replay(
    config: RunConfig,
    step: int,
    *,
    console: Console | None = None,
    devices: list[jax.Device] | None = None,
    processes: Processes | None = None,
) -> dict[str, Any]:
    """Take the run to just before `step`, take that step, and show where its numbers are.

    The batch is the one that was kept when the step was skipped, else the loader's. Returns the
    step's `loss`, `grad_norm`, whether they `equal` those of `metrics.jsonl` (None if it has
    neither), each parameter's gradient under `gradients` and each row's mean loss under `rows`.

    Raises `LrkvError` if there is no such run or step, and as `train` does.
    """
    console = console or Console(markup=False)
    run_dir = find_run(resolve(config))
    processes = processes or HERE.as_jax_knows()
    asked_dtype = config.model.dtype
    config, mesh = mesh_of(config, devices, processes)
    setup = with_data(config, mesh, processes, asked_dtype)
    steps, loader = setup.config.train.total_steps, setup.loader
    if not 1 <= step <= steps:
        raise LrkvError(f"--replay {step}: use a step from 1 to {steps}")
    folder = run_dir / "checkpoints"
    with jax.set_mesh(mesh), Checkpointer(folder, processes=processes) as checkpoints:
        abstract = abstract_state(setup.config, mesh)
        state, start, _ = resumed(setup, checkpoints, abstract, before=step)
        with compiling(setup, abstract) as program:
            run_step = program.result().call
        leaves, tree = jax.tree.flatten(state)
        del state
        for tokens_bU in loader.iterate(start, step - 1):
            batch = as_argument(setup.placed, setup.config.train.batch, tokens_bU)
            leaves, _ = run_step(leaves, batch)
        tokens_BU = _batch(run_dir, loader, step)
        report = _look(setup, jax.tree.unflatten(tree, leaves), tokens_BU)
        _, metrics = run_step(leaves, whole_on_devices(setup.placed, tokens_BU))
        numbers = metrics.floats()
    report |= {name: numbers[name] for name in ("loss", "grad_norm")}
    recorded = next((row for row in read_metrics(run_dir) if row["step"] == step), None)
    report["equal"] = recorded and all(_same(recorded[n], report[n]) for n in ("loss", "grad_norm"))
    report["records"] = loader.records_of(step - 1)
    if processes.index == 0:
        _show(console, report, loader, tokens_BU, step, start)
    return report


def _batch(run_dir: Path, loader: Loader, step: int) -> np.ndarray:
    kept = saved_batch(run_dir, step)
    if not kept.is_file():
        return loader.whole_batch_at(step - 1)
    try:
        with np.load(kept, allow_pickle=False) as arrays:
            return arrays["tokens"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise LrkvError(
            f"{kept} is damaged: delete it, and the data's own batch is used"
        ) from error


def _look(setup: Setup, state: TrainState, tokens_BU: np.ndarray) -> dict[str, Any]:
    """The gradient of every parameter, and the loss of every row, before the step is taken."""
    config, mesh, rows = setup.config, setup.mesh, setup.rows
    gradient = make_gradient(config, mesh, setup.token_bytes_V, rows)
    losses = make_loss(config.model, mesh, chunk=config.train.loss_chunk, rows=rows)

    def sizes(x):
        x = x.astype(jnp.float32)
        bad = jnp.sum(~jnp.isfinite(x))
        return jnp.stack([jnp.sqrt(jnp.sum(jnp.square(x))), jnp.max(jnp.abs(x), initial=0), bad])

    def numbers(params, tokens_BU, teacher):
        _, grads = gradient(params, tokens_BU, teacher)
        counted_BT = tokens_BU[:, 1:] >= 0
        nats_B = jnp.sum(losses(params, tokens_BU), axis=1, where=counted_BT)
        nll_B = nats_B / jnp.maximum(1, counted_BT.sum(axis=1))
        return jax.tree.map(sizes, params), jax.tree.map(sizes, grads), nll_B

    program = jax.jit(numbers, out_shardings=replicated(mesh))
    batch = whole_on_devices(setup.placed, tokens_BU)
    params, grads, nll_B = jax.tree.map(np.asarray, program(state.params, batch, state.teacher))
    return {
        "gradients": {
            name: {
                "norm": float(grad[0]),
                "largest": float(grad[1]),
                "not_finite": int(grad[2]),
                "parameter_norm": float(param[0]),
                "parameter_not_finite": int(param[2]),
            }
            for (name, grad), param in zip(
                named(grads).items(), jax.tree.leaves(params), strict=True
            )
        },
        "rows": nll_B.tolist(),
    }


def _same(recorded: float | None, now: float) -> bool:
    return recorded == now if recorded is not None else not np.isfinite(now)


def _show(console, report, loader, tokens_BU, step, start) -> None:
    equal = {None: "not in metrics.jsonl", True: "as recorded", False: "NOT as recorded"}
    console.print(
        f"step {step}, replayed from step {start}: loss {report['loss']:.6g}, gradient norm "
        f"{report['grad_norm']:.6g}, {equal[report['equal']]}",
        highlight=False,
    )
    table = Table(
        "parameter", "norm", "gradient's norm", "largest", "not finite", box=box.SIMPLE_HEAD
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for name, at in report["gradients"].items():
        bad = f"{at['not_finite']:,}" + (
            f" (parameter: {at['parameter_not_finite']:,})" if at["parameter_not_finite"] else ""
        )
        numbers = (f"{at[key]:.4g}" for key in ("parameter_norm", "norm", "largest"))
        table.add_row(name, *numbers, bad, style="bold red" if at["not_finite"] else None)
    console.print(table)
    table = Table("record", "loss", "begins", box=box.SIMPLE_HEAD)
    # What is not a number comes first.
    order = np.argsort(-np.nan_to_num(report["rows"], nan=np.inf), kind="stable")[:ROWS_SHOWN]
    for row in order:
        begins = tokens_BU[row][:24]
        text = loader.tokenizer.decode(np.where(begins < 0, ~begins, begins).tolist())
        # What fills up the last batch of the epochs is no record.
        record = str(report["records"][row]) if row < len(report["records"]) else "none"
        table.add_row(record, f"{report['rows'][row]:.4f}", repr(text)[:72])
    console.print(table)
