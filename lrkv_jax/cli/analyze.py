"""`lrkv analyze`: what a run's heads look like."""

from typing import Annotated

import typer

from lrkv_jax.cli.shared import Step, app, batches_bar, sizes, start_alone, step_named


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
    with batches_bar() as progress:
        for done, record in enumerate(records):
            progress("analyzing", done, len(records))
            analyze_run(record.path, step=step_named(step), ranks=fitted, batches=batches)
        progress("analyzing", len(records), len(records))
    for record in records:
        print(record.path / "analysis.json")
