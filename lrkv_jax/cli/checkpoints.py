"""`lrkv checkpoint`: what a run has saved, and whether it is sound."""

import json
import sys
import time
from typing import Annotated

import typer
from tabulate import tabulate

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
    rows = []
    for entry in entries:
        manifest = entry.manifest or {}
        known = {name: manifest.get(name) for name in ("tokens", "validation_loss", "saved")}
        more = {"bytes": entry.bytes, "best": entry.best, "damage": entry.damage}
        rows.append({"step": entry.step, **known, **more})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = []
    for row in rows:
        sound = f"DAMAGED: {row['damage']}" if row["damage"] else "sound" * checked
        saved = row["saved"] and time.strftime("%Y-%m-%d %H:%M", time.localtime(row["saved"]))
        state = ", ".join(filter(None, (sound, "best" * row["best"])))
        megabytes = row["bytes"] / 1e6
        table.append((row["step"], row["tokens"], row["validation_loss"], megabytes, saved, state))
    headers = ("step", "tokens", "held-out CE", "MB", "saved", "")
    formats = ("", "", ".4f", ".1f")
    print(tabulate(table, headers, floatfmt=formats, intfmt=",") if rows else "no checkpoints")
