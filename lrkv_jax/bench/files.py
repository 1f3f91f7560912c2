"""A benchmark's edges: progress on a terminal, tables, and the files it leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lrkv_jax.bench.report import MEASURED
from lrkv_jax.bench.report import Progress as Report
from lrkv_jax.bench.report import as_json as plain
from lrkv_jax.errors import LrkvError


def run_shown(
    run: Callable[[Any, Report], dict[str, Any]],
    settings: Any,
    show: Callable[[dict[str, Any], Console], None],
    console: Console | None,
) -> dict[str, Any]:
    """`run(settings, progress)` with a bar on a terminal and plain lines elsewhere, on stderr.

    The report is returned, and with a `console` shown on it.
    """
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
        show(report, console)
    return report


def command(
    run: Callable[[Any, Report], dict[str, Any]],
    settings: Any,
    show: Callable[[dict[str, Any], Console], None],
    *,
    as_json: bool,
    out: str | None,
) -> None:
    """`run_shown` from the command line: tables or JSON on stdout, files in the folder `out`."""
    report = run_shown(run, settings, show, None if as_json else Console())
    if as_json:
        print(json.dumps(plain(report), indent=2))
    if out is not None:
        for path in save(report, out):
            print(path, file=sys.stderr)


def save(report: dict[str, Any], folder: str | Path, suffix: str = "") -> list[Path]:
    """Write BENCHMARK_BACKEND.json, and a plot beside it if attention alone was decoded."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report['benchmark']}_{report['backend']}{suffix}.json"
    path.write_text(json.dumps(plain(report), indent=1) + "\n")
    written = [path]
    alone = [row for row in report["rows"] if getattr(row, "level", None) == "attention"]
    if any(row.status == MEASURED for row in alone):
        from lrkv_jax.bench.plot import draw

        written.append(path.with_suffix(".png"))
        draw(report, written[-1])
    return written


def replace_between(path: Path, name: str, body: str) -> None:
    """Put `body` between the lines `<!-- NAME -->` and `<!-- end of NAME -->` of a document.

    Raises `LrkvError` where they do not stand once each, in this order.
    """
    text = path.read_text(encoding="utf-8")
    opening, closing = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(opening)
    _, ended, after = rest.partition(closing)
    if not (found and ended) or opening in rest or closing in after:
        raise LrkvError(f"{path} needs one {opening.strip()} and then one {closing}")
    path.write_text(f"{before}{opening}\n{body.strip()}\n\n{closing}{after}", encoding="utf-8")
