"""A benchmark's edges: progress on a terminal, tables, and the files it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lrkv_jax.bench.decode import Settings, run
from lrkv_jax.bench.report import MEASURED, as_json
from lrkv_jax.bench.table import print_report


def run_shown(settings: Settings, console: Console | None) -> dict[str, Any]:
    """Run with a bar on a terminal and plain lines elsewhere, on stderr; tables on `console`."""
    errors = Console(stderr=True)
    if not errors.is_terminal:

        def line(text: str, done: int, total: int) -> None:
            errors.print(f"{done}/{total} {text}", highlight=False)

        report = run(settings, line)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TimeElapsedColumn())  # fmt: skip
        with Progress(*columns, console=errors, transient=True) as bar:
            task = bar.add_task("starting", total=None)

            def move(text: str, done: int, total: int) -> None:
                bar.update(task, description=text, completed=done, total=total)

            report = run(settings, move)
    if console is not None:
        print_report(report, console)
    return report


def save(report: dict[str, Any], folder: str | Path, suffix: str = "") -> list[Path]:
    """Write decode_BACKEND.json, and a plot beside it if attention alone was measured."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"decode_{report['backend']}{suffix}.json"
    path.write_text(json.dumps(as_json(report), indent=1) + "\n")
    written = [path]
    if any(row.level == "attention" and row.status == MEASURED for row in report["rows"]):
        from lrkv_jax.bench.plot import draw

        written.append(path.with_suffix(".png"))
        draw(report, written[-1])
    return written
