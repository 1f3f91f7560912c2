"""lrkv checkpoint: what a run has saved, whether it is sound, and what may go."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lrkv_jax.cli.shared import Run, group, step_named
from lrkv_jax.errors import EXIT_BAD_INPUT, LrkvError

checkpoint_app = group("checkpoint", "Look after a run's checkpoints.")

Json = Annotated[bool, typer.Option("--json", help="print JSON, not a table")]


def _on_the_host() -> None:
    """Orbax and the fingerprints need a device; the host's will do, and a GPU may be training."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


@checkpoint_app.command("list")
def checkpoint_list(run: Run, as_json: Json = False) -> None:
    """Every step with its tokens, loss and size; reads manifests alone."""
    _on_the_host()
    from lrkv_jax.checkpoint.inspect import entries

    _print(entries(run), as_json)


@checkpoint_app.command("verify")
def checkpoint_verify(
    run: Run,
    step: Annotated[str | None, typer.Option(help="one step; all unless given")] = None,
    as_json: Json = False,
) -> None:
    """Read every file and array and compare them with what was saved; exit code 2 for damage."""
    _on_the_host()
    from lrkv_jax.checkpoint.inspect import entries, verify

    there = entries(run)
    if step is not None:
        number = step_named(step)
        there = [e for e in there if (e.best if number == "best" else e.step == number)]
        if not there:
            raise LrkvError(f"no checkpoint of step {step} in {run}: see lrkv checkpoint list")
    checked = [verify(entry) for entry in there]
    _print(checked, as_json, checked=True)
    if not checked or any(entry.damage for entry in checked):
        sys.exit(EXIT_BAD_INPUT)


@checkpoint_app.command("prune")
def checkpoint_prune(
    run: Run,
    keep: Annotated[int, typer.Option(help="newest sound steps that stay, beside the best")] = 1,
    dry: Annotated[bool, typer.Option("--dry-run", help="delete nothing")] = False,
) -> None:
    """Delete old steps, once newer ones have been verified."""
    _on_the_host()
    from lrkv_jax.checkpoint.inspect import prune

    gone = prune(run, keep, dry=dry)
    verb = "would delete" if dry else "deleted"
    steps = ", ".join(str(entry.step) for entry in gone) or "none"
    print(f"{verb} {len(gone)} of {run}'s checkpoints: {steps}")


def _print(entries, as_json: bool, *, checked: bool = False) -> None:
    rows = [
        {
            "step": entry.step,
            "tokens": (entry.manifest or {}).get("tokens"),
            "validation_loss": (entry.manifest or {}).get("validation_loss"),
            "bytes": entry.bytes,
            "saved": (entry.manifest or {}).get("saved"),
            "best": entry.best,
            "damage": entry.damage,
        }
        for entry in entries
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        print("no checkpoints")
        return
    table = Table("step", "tokens", "held-out CE", "MB", "saved", "", box=None)
    for column in table.columns[:4]:
        column.justify = "right"
    for row in rows:
        state = row["damage"] and f"DAMAGED: {row['damage']}"
        notes = [state or ("sound" if checked else "")] + (["best"] if row["best"] else [])
        loss, saved = row["validation_loss"], row["saved"]
        table.add_row(
            str(row["step"]),
            "" if row["tokens"] is None else f"{row['tokens']:,}",
            "" if loss is None else f"{loss:.4f}",
            f"{row['bytes'] / 1e6:,.1f}",
            "" if saved is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(saved)),
            ", ".join(note for note in notes if note),
            style="bold red" if state else None,
        )
    Console(soft_wrap=True).print(table, highlight=False)
