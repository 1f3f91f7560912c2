"""`lrkv sweep`: a grid of runs, here or as a job array."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lrkv_jax.cli.shared import Config, app, names
from lrkv_jax.errors import EXIT_START_AGAIN, LrkvError


@app.command()
def sweep(
    config: Config,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE[,VALUE]...",
            help="Settings as of lrkv train; each of several values, separated by commas, "
            "makes a run.",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder of the runs (default: runs/NAME).")
    ] = None,
    tasks: Annotated[str, typer.Option(help="What each run is evaluated on")] = "bpb,agreement",
    archive: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Add each finished run to this file of JSON lines, which lrkv report reads, and "
            "skip the runs that it has; their directories can then be deleted.",
        ),
    ] = None,
    only: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Only that run, counted from 0, as $SLURM_ARRAY_TASK_ID does."
        ),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the runs, and start nothing.")
    ] = False,
) -> None:
    """Train and evaluate a run for every combination of settings.

    As in: lrkv sweep configs/nano.yaml seed=0,1,2 attention=mha,lrkv. The same command
    resumes a sweep that was stopped, and skips what is done.
    """
    from lrkv_jax.lab.sweep.grid import grid

    points = grid(config, settings or [], out)  # a mistake costs no import of JAX
    from lrkv_jax.lab.sweep.display import Display
    from lrkv_jax.lab.sweep.work import state_of, work

    if list_ and only is not None:
        raise LrkvError("--only with --list: the list has all runs, with their numbers")
    wanted = names(tasks)
    console = Console(highlight=False, markup=False)
    if list_:
        known = {}
        if archive:
            from lrkv_jax.lab.report.comparison.files import archived_by_name

            known = archived_by_name(archive)
        for number, point in enumerate(points):
            console.print(f"{number:3d}  {state_of(point, wanted, known)}", end="  ")
            print(shlex.join(["lrkv", "train", *point.arguments]))
        return
    if only is not None:
        if not 0 <= only < len(points):
            raise LrkvError(f"--only {only}: the sweep's runs are 0 to {len(points) - 1}")
        points = [points[only]]
    display = Display(points, console)
    logs = points[0].directory.parent / "logs"
    console.print(f"{len(points)} runs; what each prints is in {logs}", soft_wrap=True)
    with display:
        ended = work(
            points, tasks=wanted, logs=logs, report=display.report, watch=display.watch,
            archive=archive,
        )  # fmt: skip
    failed = [one for one in display.outcomes.values() if one.error]
    display.print_results()
    if not ended:
        print("stopped: the same command resumes", file=sys.stderr)
        sys.exit(EXIT_START_AGAIN)
    if failed:
        raise LrkvError(f"{len(failed)} of {len(points)} runs failed: see {logs}")
