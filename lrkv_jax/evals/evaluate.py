"""`lrkv evaluate`: held-out loss of a trained run, and whether its cache decodes what it learnt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from lrkv_jax.data.loader import heldout_batches
from lrkv_jax.data.tokenizer import load_tokenizer
from lrkv_jax.decode import Engine
from lrkv_jax.errors import LrkvError
from lrkv_jax.evals.agreement import decode_agreement
from lrkv_jax.train.restore import TrainedRun, load_run
from lrkv_jax.train.rows import RowFormat
from lrkv_jax.train.validate import make_validation

AGREEMENT_ROWS = 4
AGREEMENT_STEPS = 64


def evaluate(
    directory: str | Path,
    *,
    tasks: Sequence[str] = ("bpb", "agreement"),
    batch: int | None = None,
    step: int | str | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Evaluate a run and write the result to `evaluation.json` in its directory.

    `bpb` is cross-entropy and bits per byte over the whole held-out split, the same whatever
    `batch` (the run's own unless given); `agreement` compares cached decoding with the
    whole-sequence forward on held-out text. Raises `LrkvError` for an unknown task, or a run
    that cannot be read.
    """
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        raise LrkvError(f"unknown task {', '.join(unknown)}: use {', '.join(TASKS)}")
    if batch is not None and batch < 1:
        raise LrkvError(f"batch = {batch}: use 1 or more")
    run = load_run(directory, step=step, overrides=overrides)
    engine = Engine(
        run.config.model, run.params, batch=1, length=run.config.train.context, mesh=run.mesh
    )
    report = engine.report()
    result = {
        "run": str(directory),
        "attention": run.config.model.attention.kind,
        "step": run.step,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(run.params)),
        "kv_cache_bytes_per_token": report.cache_bytes_per_token,
        "kv_cache_bytes_per_token_formula": report.cache_bytes_per_token_formula,
        "dtype": run.config.model.dtype,
    }
    for task in tasks:
        result[task] = TASKS[task](run, batch or run.config.train.batch)
    path = Path(directory) / "evaluation.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _held_out(run: TrainedRun, batch: int) -> dict[str, float]:
    config = run.config
    tokenizer = load_tokenizer(config.data.tokenizer)
    token_bytes_V = tokenizer.token_bytes_up_to(config.model.vocabulary)
    validate = make_validation(
        config.model, run.mesh, token_bytes_V,
        chunk=config.train.loss_chunk, rows=RowFormat.of(config, tokenizer),
    )  # fmt: skip
    return validate(run.params, heldout_batches(config.data, config.train.context, batch)).as_dict()


def _agreement(run: TrainedRun, batch: int) -> dict[str, float]:
    """On the first held-out records, prompts of different lengths, then token by token."""
    del batch
    config = run.config
    tokens_BU = next(heldout_batches(config.data, config.train.context, AGREEMENT_ROWS))
    tokens_BT = tokens_BU[:, : min(config.train.context, 4 * AGREEMENT_STEPS)]
    T = tokens_BT.shape[1]
    longest = T - min(AGREEMENT_STEPS, T // 2)
    lengths = [max(1, longest - 17 * row) for row in range(len(tokens_BT))]
    agreement = decode_agreement(config.model, run.params, tokens_BT, lengths, mesh=run.mesh)
    return agreement.as_dict()


TASKS = {"bpb": _held_out, "agreement": _agreement}


def print_evaluation(result: dict[str, Any], console: Console) -> None:
    """The result as a table."""
    table = Table(title=f"{result['run']}  {result['attention']}  step {result['step']}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("parameters", f"{result['parameters']:,}")
    table.add_row(
        "KV-cache bytes a token (live cache)", f"{result['kv_cache_bytes_per_token']:,.0f}"
    )
    table.add_row(
        "KV-cache bytes a token (formula)", f"{result['kv_cache_bytes_per_token_formula']:,}"
    )
    if "bpb" in result:
        held = result["bpb"]
        table.add_row("held-out cross-entropy, nats a token", f"{held['cross_entropy']:.4f}")
        table.add_row("held-out bits per byte", f"{held['bits_per_byte']:.4f}")
        table.add_row("held-out tokens", f"{held['tokens']:,}")
        table.add_row("held-out bytes", f"{held['bytes']:,}")
    if "agreement" in result:
        agreement = result["agreement"]
        table.add_row(
            "cached decode against forward, largest relative difference",
            f"{agreement['max_relative_error']:.1e}",
        )
        table.add_row(
            f"same greedy token, of {agreement['positions']}",
            f"{agreement['same_greedy_token']:.2%}",
        )
    console.print(table)
