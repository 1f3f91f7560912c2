"""`lrkv analyze`: what a run's heads look like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lrkv_jax.cli.shared import app, batches_bar, sizes, step_named
from lrkv_jax.errors import LrkvError


@app.command()
def analyze(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="runs' directories, or folders of runs")
    ],
    out: Annotated[
        Path | None, typer.Option(help="folder of the plots and the page; RUN/analysis of one run")
    ] = None,
    step: Annotated[str | None, typer.Option(help="a saved step, or best")] = None,
    ranks: Annotated[
        str | None, typer.Option(help="that factorisations are fitted at; LRKV's own")
    ] = None,
    null_seeds: Annotated[int, typer.Option(help="random layers that make the null")] = 8,
    batches: Annotated[
        int, typer.Option(help="of held-out text that weighs every statistic once more; 0: none")
    ] = 0,
    steps: Annotated[bool, typer.Option("--steps", help="every kept checkpoint as well")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="also runs that are analysed")] = False,
) -> None:
    """Head diversity, norms, geometry and optimal factorisations: JSON, plots and an HTML page.

    Writes analysis.json into each run; one that has it of the same step is not analysed again.
    """
    from lrkv_jax.analysis import analyse, analyse_steps
    from lrkv_jax.artefacts import Section, page, write
    from lrkv_jax.artefacts.heads import ARTEFACTS
    from lrkv_jax.comparison import read_runs
    from lrkv_jax.runtime import start

    start(alone="lrkv analyze")
    for option, given, least in (("--null-seeds", null_seeds, 1), ("--batches", batches, 0)):
        if given < least:
            raise LrkvError(f"{option} {given}: use {least} or more")
    wanted = step_named(step)
    records = read_runs(runs)
    folder = out or (records[0].path / "analysis" if len(records) == 1 else None)
    if folder is None:
        raise LrkvError(f"{len(records)} runs make one page: say where with --out FOLDER")
    fitted = None if ranks is None else sizes("--ranks", ranks)
    with batches_bar() as progress:
        for done, record in enumerate(records):
            progress("analysing", done, len(records))
            if fresh or not _analysed(record, wanted, fitted, weighted=batches > 0):
                analyse(
                    record.path, step=wanted, null_seeds=null_seeds, ranks=fitted,
                    batches=batches,
                )  # fmt: skip
            if steps:
                analyse_steps(record.path)
        progress("analysing", len(records), len(records))
    records = read_runs(runs)
    sections = []
    for artefact in ARTEFACTS:
        made = artefact.made(records)
        write(artefact, made, folder)
        sections.append(Section.of(artefact, made))
    report = folder / "index.html"
    report.write_text(page("Heads", sections, about=_about(records)), encoding="utf-8")
    Console().print(_table(records))
    print(report)


def _analysed(
    record, step: int | str | None, ranks: tuple[int, ...] | None, *, weighted: bool
) -> bool:
    """Whether `analysis.json` has what is asked for: the step, the ranks if any are, the text."""
    if record.analysis is None or step == "best":
        return False
    fitted = tuple(fit["rank"] for fit in record.analysis["factorisation"])
    wanted = record.steps_done if step is None else step
    has_text = record.analysis["weighted"] is not None
    fits = ranks in (None, fitted) and (has_text or not weighted)
    return record.analysis["step"] == wanted and fits


def _about(records) -> str:
    return "; ".join(f"{r.path.name} at step {r.analysis['step']}" for r in records)


def _table(records) -> Table:
    table = Table(
        title="Effective rank of the heads' query-key forms, means over layers",
        caption="% of the cap, H uncentred and H − 1 centred; in brackets, random weights.",
    )
    for column in ("run", "uncentred", "centred", "90 % of variance in", "mean cosine"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for record in records:
        forms = record.analysis["query_key"]
        mean, null = forms["mean"], forms["null"]["mean"]
        ranks = (
            f"{_or_none(mean[view]['percent_of_cap'])} ({_or_none(null[view]['percent_of_cap'])})"
            for view in ("uncentred", "centred")
        )
        components = f"{mean['centred']['components_90']:.1f} of {record.analysis['heads'] - 1}"
        cosine = _or_none(mean["mean_off_diagonal"], "+.3f")
        table.add_row(record.path.name, *ranks, components, cosine)
    return table


def _or_none(value: float | None, written: str = ".1f") -> str:
    """A model of one head has no pairs of heads, and no dimension once their mean is out."""
    return "none" if value is None else format(value, written)
