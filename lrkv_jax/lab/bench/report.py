"""A benchmark's report: where it was measured, how it is shown, and the files that it leaves."""

import datetime
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jaxlib
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

import lrkv_jax
from lrkv_jax import files
from lrkv_jax.distributed.device import device_name, usable_cores
from lrkv_jax.errors import LrkvError

MEASURED, SKIPPED, WRONG, FAILED = "measured", "skipped", "wrong", "failed"

Progress = Callable[[str, int, int], None]  # what is measured, how many are done, of how many


def silent(text: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def check(settings: Any, *names: str) -> None:
    """Raise `LrkvError` for an empty list among these, and for no samples or no layers."""
    for name in names:
        if getattr(settings, name) == ():
            raise LrkvError(f"{name}: nothing is listed, so there is nothing to measure")
    if settings.samples < 1 or (settings.depth is not None and settings.depth < 1):
        raise LrkvError("samples and depth: use 1 or more")


def compare_with_mha(rows: Sequence[Any], **over: str) -> None:
    """Fill in each measured row's fields over those of the fastest MHA at its `shape`.

    `over` names fields that receive a ratio, and the field that each is of: as `time_over_mha`,
    the time by which MHA is the fastest.
    """
    measured = [row for row in rows if row.status == MEASURED]
    best: dict[tuple, Any] = {}
    for row in measured:
        if row.variant == "mha":
            fastest = best.setdefault(row.shape, row)
            best[row.shape] = min(fastest, row, key=attrgetter(over["time_over_mha"]))
    for row in measured:
        if row.shape in best:
            for ratio, of in over.items():
                setattr(row, ratio, getattr(row, of) / getattr(best[row.shape], of))


def machine() -> dict[str, Any]:
    """Where and with what: device, versions, date, command, and how busy the machine was."""
    return {
        "backend": jax.default_backend(),
        "device": device_name(),
        "cores": usable_cores(),
        "load_average": os.getloadavg()[0],
        "versions": {
            "lrkv_jax": lrkv_jax.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([_program(), *sys.argv[1:]]),
    }


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "lrkv" if name == "__main__.py" else name


def reason_of(error: Exception) -> tuple[str, str]:
    """(status, reason in one line): what cannot run here said so, anything else is a failure."""
    if isinstance(error, LrkvError):
        return SKIPPED, str(error)
    first = (str(error).splitlines() or [""])[0]
    return FAILED, f"{type(error).__name__}: {first}"[:200]


def where(report: dict[str, Any]) -> str:
    """The machine and the number format, in words."""
    return (
        f"{report['device']} ({report['backend']}, {report['cores']} cores, "
        f"load {report['load_average']:.1f}), {report['settings']['dtype']}, "
        f"jax {report['versions']['jax']}"
    )


def table(*headers: str, left: int = 1) -> Table:
    """A table of numbers, the first `left` columns of words.

    The first column may wrap between words, so that no number and no header is cut at 80 columns.
    """
    made = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for place, header in enumerate(headers):
        made.add_column(header, justify="left" if place < left else "right", no_wrap=place > 0)
    return made


def spread(median: float, first: float, third: float) -> str:
    """Half the distance between the quartiles, as a share of the median."""
    return f"±{50 * (third - first) / median:.0f} %"


def as_json(report: dict[str, Any]) -> dict[str, Any]:
    """The report with its rows as plain dictionaries."""
    return {**report, "rows": [asdict(row) for row in report["rows"]]}


def run_shown(
    run: Callable[[Any, Progress], dict[str, Any]],
    settings: Any,
    show: Callable[[dict[str, Any], Console], None],
    console: Console | None,
) -> dict[str, Any]:
    """`run(settings, progress)` with a bar on a terminal and plain lines elsewhere, on stderr.

    The report is returned, and with a `console` shown on it.
    """
    errors = Console(stderr=True)
    if not errors.is_terminal:
        report = run(
            settings,
            lambda text, done, total: errors.print(f"{done}/{total} {text}", highlight=False),
        )
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TimeElapsedColumn())  # fmt: skip
        with Bar(*columns, console=errors, transient=True) as bar:
            task = bar.add_task("starting", total=None)

            def move(text: str, done: int, total: int) -> None:
                bar.update(task, description=text, completed=done, total=total)

            report = run(settings, move)
    if console is not None:
        show(report, console)
    return report


def command(
    run: Callable[[Any, Progress], dict[str, Any]],
    settings: Any,
    show: Callable[[dict[str, Any], Console], None],
    *,
    print_json: bool,
    out: str | None,
    draw: Callable[[dict[str, Any], Path], bool] | None = None,
) -> None:
    """`run_shown` from the command line: tables or JSON on stdout, files in the folder `out`."""
    report = run_shown(run, settings, show, None if print_json else Console())
    if print_json:
        print(json.dumps(as_json(report), indent=2))
    if out is not None:
        for path in save(report, out, draw=draw):
            print(path, file=sys.stderr)


def save(
    report: dict[str, Any],
    folder: str | Path,
    suffix: str = "",
    *,
    draw: Callable[[dict[str, Any], Path], bool] | None = None,
) -> list[Path]:
    """Write BENCHMARK_BACKEND.json, and what `draw` makes of the report as a PNG beside it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{report['benchmark']}_{report['backend']}{suffix}.json"
    files.write(path, json.dumps(as_json(report), indent=1) + "\n")
    drawn = draw is not None and draw(report, path.with_suffix(".png"))
    return [path, path.with_suffix(".png")] if drawn else [path]


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
