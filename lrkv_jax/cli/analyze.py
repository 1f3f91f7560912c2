"""`lrkv analyze`: what a run's heads look like."""

from pathlib import Path
from typing import Annotated

import typer

from lrkv_jax.cli.shared import Step, app, batches_bar, sizes, start_alone, step_named
from lrkv_jax.errors import LrkvError


@app.command()
def analyze(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Directories of runs, or folders of them.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the plots and the page (default: RUN/analysis, for one run)."
        ),
    ] = None,
    step: Step = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="R,...", help="Ranks to fit factorizations at (default: that of an LRKV run)."
        ),
    ] = None,
    null_seeds: Annotated[
        int, typer.Option(min=1, help="Random layers that the null is averaged over")
    ] = 8,
    batches: Annotated[
        int,
        typer.Option(
            min=0,
            help="Batches of held-out text to compare heads' logits on, and to weight "
            "heads' forms by; 0 leaves both out",
        ),
    ] = 0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Analyze runs again that have been analyzed.")
    ] = False,
) -> None:
    """Describe the heads of runs.

    This covers diversity, norms, geometry and optimal factorizations. It writes plots and an HTML
    page, and analysis.json into each run. A run that has one of the same step is not analyzed
    again.
    """
    start_alone("analyze")
    from lrkv_jax.lab.analysis import analyze as analyze_run
    from lrkv_jax.lab.report.comparison import read_runs
    from lrkv_jax.lab.report.page import first_table, write_page
    from lrkv_jax.lab.report.paper import REPORT_ITEMS
    from lrkv_jax.lab.report.renderers import terminal

    wanted = step_named(step)
    records = read_runs(runs)
    folder = out or (records[0].path / "analysis" if len(records) == 1 else None)
    if folder is None:
        raise LrkvError(f"{len(records)} runs make one page: say where with --out FOLDER")
    fitted = None if ranks is None else sizes("--ranks", ranks)
    with batches_bar() as progress:
        for done, record in enumerate(records):
            progress("analyzing", done, len(records))
            if fresh or not _analyzed(record, wanted, fitted, on_text=batches > 0):
                analyze_run(
                    record.path, step=wanted, null_seeds=null_seeds, ranks=fitted,
                    batches=batches,
                )  # fmt: skip
        progress("analyzing", len(records), len(records))
    records = read_runs(runs)
    page = folder / "index.html"
    heads = [one for one in REPORT_ITEMS if one.reads == "analyses"]
    with batches_bar() as progress:
        sections = write_page(page, "Heads of trained models", heads, records, progress=progress)
    if table := first_table(sections):
        print(terminal(table))
    print(page)


def _analyzed(
    record, step: int | str | None, ranks: tuple[int, ...] | None, *, on_text: bool
) -> bool:
    """Whether `analysis.json` has what is asked for: the step, any ranks, and the text."""
    if record.analysis is None or step == "best":
        return False
    fitted = tuple(fit["rank"] for fit in record.analysis["factorisation"])
    wanted = record.steps_done if step is None else step
    has_text = record.analysis.get("logits") is not None
    fits = ranks in (None, fitted) and (has_text or not on_text)
    return record.analysis["step"] == wanted and fits
