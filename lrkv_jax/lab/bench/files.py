"""What a benchmark leaves behind: JSON, a plot, and tables in a document."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from lrkv_jax import files
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench.report import MEASURED, Progress, as_json, run_shown


def command(
    run: Callable[[Any, Progress], dict[str, Any]],
    settings: Any,
    show: Callable[[dict[str, Any], Console], None],
    *,
    print_json: bool,
    out: str | None,
) -> None:
    """`run_shown` from the command line: tables or JSON on stdout, files in the folder `out`."""
    report = run_shown(run, settings, show, None if print_json else Console())
    if print_json:
        print(json.dumps(as_json(report), indent=2))
    if out is not None:
        for path in save(report, out):
            print(path, file=sys.stderr)


def save(report: dict[str, Any], folder: str | Path, suffix: str = "") -> list[Path]:
    """Write BENCHMARK_BACKEND.json, and a plot beside it of decode attention alone."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report['benchmark']}_{report['backend']}{suffix}.json"
    files.write(path, json.dumps(as_json(report), indent=1) + "\n")
    alone = [row for row in report["rows"] if getattr(row, "level", None) == "attention"]
    if not any(row.status == MEASURED for row in alone):
        return [path]
    from lrkv_jax.lab.bench.decode_plot import draw

    draw(report, path.with_suffix(".png"))
    return [path, path.with_suffix(".png")]


def read_decode(path: Path) -> dict[str, Any]:
    """The report that `lrkv bench decode --out` wrote; raises `LrkvError` for any other file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if {"rows", "backend"} <= found.keys():
            return found
    except OSError as error:
        raise LrkvError(f"{path}: {error.strerror}") from error
    except (ValueError, AttributeError):
        pass
    raise LrkvError(f"{path} is not a decode benchmark: use a JSON of lrkv bench decode")


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
