"""`lrkv sweep`: a grid of runs, here or as a job array."""

import shlex
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

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
    jobs: Annotated[int, typer.Option(help="Runs at a time, each on its share of the cores")] = 1,
    keep: Annotated[
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
    from lrkv_jax.lab.sweep.state import state_of
    from lrkv_jax.lab.sweep.working import work

    wanted = names(tasks)
    console = Console(highlight=False, markup=False)
    if list_:
        known = {}
        if keep:
            from lrkv_jax.lab.report.comparison import kept_by_name

            known = kept_by_name(keep)
        for number, point in enumerate(points):
            console.print(f"{number:3d}  {_so_far(state_of(point, wanted, known))}", end="  ")
            print(shlex.join(["lrkv", "train", *point.arguments]))
        return
    if only is not None:
        if not 0 <= only < len(points):
            raise LrkvError(f"--only {only}: the sweep's runs are 0 to {len(points) - 1}")
        points = [points[only]]
    failed: list[str] = []
    width = max(len(point.name) for point in points)
    ended = 0

    def report(outcome) -> None:
        nonlocal ended
        if outcome.state.name == "new" and not outcome.error:
            return  # the sweep was stopped before it began
        ended += 1
        said = outcome.error or _so_far(outcome.state)
        spent = timedelta(seconds=round(outcome.seconds or 0))
        time = f" in {spent}" if outcome.seconds else ", as it was"
        name = f"{ended:3d}/{len(points)}  {outcome.point.name:{width}}"
        console.print(f"{name}  {said}{time}", soft_wrap=True)
        if outcome.error:
            failed.append(outcome.point.name)

    folder = points[0].directory.parent
    with console.status(Text(f"{len(points)} runs; what each prints is in {folder / 'logs'}")):
        ran = work(points, tasks=wanted, jobs=jobs, logs=folder / "logs", report=report, kept=keep)
    if failed:
        raise LrkvError(f"{len(failed)} of {len(points)} runs failed: see {Path(folder, 'logs')}")
    if not ran:
        print("stopped: the same command resumes", file=sys.stderr)
        sys.exit(EXIT_START_AGAIN)


def _so_far(state) -> str:
    if state.name == "begun":
        return f"begun, step {state.step}"
    loss = (state.evaluation or {}).get("bpb")
    return f"{state.name}, {loss['bits_per_byte']:.4f} bits per byte" if loss else state.name
