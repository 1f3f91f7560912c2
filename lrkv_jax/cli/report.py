"""`lrkv report` and `lrkv analyze`: the tables and figures of the paper, made of runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lrkv_jax.cli.shared import Step, app, names, sizes, start_alone, step_named, working
from lrkv_jax.errors import LrkvError

if TYPE_CHECKING:
    from lrkv_jax.lab.report.page import ReportItem


@app.command()
def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="Directories of runs, or folders of them."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="Names, or their beginnings: fig05,table01 (default: all)."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the files and the page")] = Path("out"),
    bench: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="JSON of lrkv bench decode, for choosing; may be repeated."
        ),
    ] = None,
) -> None:
    """Write every table and figure of the paper from these runs.

    One HTML page shows them all. Tables are written as Markdown and JSON, figures as
    PNG and SVG. Figures of heads need lrkv analyze RUN first. The page lists what has no
    data, and what it needs.
    """
    start_alone("report")
    with working("starting, for some seconds"):
        from lrkv_jax.lab.bench.report import read_decode
        from lrkv_jax.lab.report.comparison import read_sound_runs
        from lrkv_jax.lab.report.page import first_table, write_page
        from lrkv_jax.lab.report.paper import REPORT_ITEMS
        from lrkv_jax.lab.report.renderers import terminal

    chosen = _chosen(REPORT_ITEMS, only)
    benches = [read_decode(path) for path in bench or []]
    with working("reading the runs"):
        records, broken = read_sound_runs(runs or [])
    if broken and not records:
        folder, reason = next(iter(broken.items()))
        raise LrkvError(f"{folder}: {reason}")
    path = out / "report.html"
    with working("tables and figures") as progress:
        sections = write_page(
            path, "Low-rank key-value attention: tables and figures", chosen, records,
            broken=broken, benches=benches, progress=progress,
        )  # fmt: skip
    if table := first_table(sections):
        print(terminal(table))
    for folder, reason in broken.items():
        print(f"left out: {folder}: {reason}", file=sys.stderr)
    shown = sum(bool(section.made) for section in sections)
    absent = f"; {len(sections) - shown} without data, listed there" * (shown < len(sections))
    print(f"{path}: {shown} tables and figures{absent}")


def _chosen(items: tuple[ReportItem, ...], only: str | None) -> list[ReportItem]:
    """The items whose names begin with one of the words of `only`, or all without it."""
    if only is None:
        return list(items)
    words = names(only)
    for word in words:
        if not any(one.name.startswith(word) for one in items):
            known = ", ".join(one.name for one in items)
            raise LrkvError(f"--only {word}: no table or figure begins so; use one of {known}")
    if not words:
        raise LrkvError("--only: name a table or figure, as in fig05,table01")
    return [one for one in items if one.name.startswith(words)]


@app.command()
def analyze(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Directories of runs, or folders of them.")
    ],
    step: Step = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="R,...", help="Ranks to fit factorizations at (default: that of an LRKV run)."
        ),
    ] = None,
    batches: Annotated[
        int,
        typer.Option(
            min=0, help="Batches of held-out text to compare heads' logits on; 0 leaves them out"
        ),
    ] = 0,
) -> None:
    """Describe the heads of runs.

    This covers diversity, norms, geometry and optimal factorizations. It writes
    analysis.json into each run, and lrkv report RUN draws them.
    """
    start_alone("analyze")
    from lrkv_jax.lab.analysis import analyze as analyze_run
    from lrkv_jax.lab.report.comparison import read_runs

    fitted = None if ranks is None else sizes("--ranks", ranks)
    records = read_runs(runs)
    with working("analyzing") as progress:
        for done, record in enumerate(records):
            progress("analyzing", done, len(records))
            analyze_run(record.path, step=step_named(step), ranks=fitted, batches=batches)
        progress("analyzing", len(records), len(records))
    for record in records:
        print(record.path / "analysis.json")
