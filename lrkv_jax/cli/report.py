"""`lrkv report` and `lrkv analyze`: pages of runs, and the paper's tables and figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lrkv_jax.cli.shared import Step, app, names, sizes, start_alone, working
from lrkv_jax.errors import LrkvError

if TYPE_CHECKING:
    from lrkv_jax.lab.report.paper import ReportItem


WIDE = ("cached values", "live cache", "CE")  # columns that the page alone has


@app.command()
def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Directories of runs, or folders of them (default: runs; with --paper or "
            "--only, none).",
        ),
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Add the paper's tables and figures, with its values.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Of the paper's tables and figures, those that begin so: fig05,table01.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the files and the page")] = Path("out"),
) -> None:
    """Write a page that compares runs and shows each one.

    It has curves, intervals, samples, speed and cost. The paper's tables and figures
    come with --paper or --only: tables as Markdown and JSON too, figures as PNG and SVG.
    Figures of heads need lrkv analyze RUN first.
    """
    with working("reading the runs"):
        from lrkv_jax.lab.report.comparison.files import read_sound_runs
        from lrkv_jax.lab.report.page import write_page
        from lrkv_jax.lab.report.paper import REPORT_ITEMS
        from lrkv_jax.lab.report.renderers import terminal
        from lrkv_jax.lab.report.tables import Table

        items = _chosen(REPORT_ITEMS, only) if paper or only is not None else []
        records, broken = read_sound_runs(runs or ([] if items else ["runs"]))
    if broken and not records:
        folder, reason = next(iter(broken.items()))
        raise LrkvError(f"{folder}: {reason}")
    if items:  # some allocate caches
        start_alone("report")
    path = out / "report.html"
    with working("tables and figures") as progress:
        sections = write_page(path, records, items, broken=broken, progress=progress)
    shown = {"runs"} if only is None else {item.name for item in items}
    parts = [part for section in sections if section.name in shown for part in section.parts]
    if only is not None and not parts:
        raise LrkvError(f"--only {only}: these {items[0].reads} have nothing to show there")
    for table in parts:
        # lrkv runs lists the runs.
        if isinstance(table, Table) and table.title != "Runs" and table.name != "printed":
            print(terminal(table.with_data(*WIDE)), end="\n\n")
    for folder, reason in broken.items():
        print(f"left out: {folder}: {reason}", file=sys.stderr)
    print(path)


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
        Any,
        typer.Option(
            parser=sizes, metavar="R,...", help="Ranks of the fits (default: an LRKV run's)."
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
    analysis.json into each run, and lrkv report RUN --paper draws them.
    """
    start_alone("analyze")
    from lrkv_jax.lab.analysis import analyze as analyze_run
    from lrkv_jax.lab.report.comparison.files import read_runs

    records = read_runs(runs)
    for record in records:
        if not record.path.is_dir():
            raise LrkvError(f"{record.path} is archived, without weights: give a run's directory")
    with working("analyzing") as progress:
        for done, record in enumerate(records):
            progress("analyzing", done, len(records))
            analyze_run(record.path, step=step, ranks=ranks, batches=batches)
        progress("analyzing", len(records), len(records))
    for record in records:
        print(record.path / "analysis.json")
