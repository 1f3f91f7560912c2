"""`lrkv checkpoint`: what a run has saved, and whether it is sound."""

import json
import sys
import time
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from lrkv_jax.cli.shared import Json, Run, group, step_named
from lrkv_jax.errors import EXIT_BAD_INPUT, LrkvError

checkpoint_app = group("checkpoint", "List and verify a run's checkpoints.")


@checkpoint_app.command("list")
def checkpoint_list(run: Run, as_json: Json = False) -> None:
    """List every saved step with its tokens, loss and size.

    Only manifests are read.
    """
    from lrkv_jax.training.checkpointing.inspect import entries

    _print(entries(run), as_json)


@checkpoint_app.command("verify")
def checkpoint_verify(
    run: Run,
    step: Annotated[
        str | None, typer.Option(metavar="N|best", help="Which checkpoint (default: all).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every file and compare it with what was saved.

    Exits with 2 if anything is damaged.
    """
    from lrkv_jax.training.checkpointing.inspect import entries, verify

    there = entries(run)
    if step is not None:
        number = step_named(step)
        there = [e for e in there if (e.best if number == "best" else e.step == number)]
        if not there:
            raise LrkvError(f"no checkpoint of step {step} in {run}: see lrkv checkpoint list")
    checked = [found for entry in there if (found := verify(entry))]
    _print(checked, as_json, checked=True)
    if not checked or any(entry.damage for entry in checked):
        sys.exit(EXIT_BAD_INPUT)


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
    table = Table(
        "step", "tokens", "held-out CE", "MB", "saved", "", box=box.SIMPLE_HEAD, pad_edge=False
    )
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
    Console(soft_wrap=True, markup=False).print(table, highlight=False)
