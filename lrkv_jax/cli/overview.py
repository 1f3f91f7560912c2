"""`lrkv runs`, `lrkv compare` and `lrkv show`: which runs there are, and how two of them differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lrkv_jax import files
from lrkv_jax.cli.shared import Json, Overrides, app
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.report.tabulated import tabulated


@app.command()
def runs(
    folders: Annotated[
        list[str] | None, typer.Argument(metavar="DIR", help="Folders of runs (default: runs).")
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs: variant, step, state, loss, speed, size and age."""
    from lrkv_jax.lab.overview import HEADERS, as_cells, row_of
    from lrkv_jax.lab.report.comparison.files import read_sound_runs

    sound, broken = read_sound_runs(folders or ["runs"])
    rows = [row_of(run) for run in sound]
    if as_json:
        print(files.json_of(rows))
    else:
        print(tabulated(HEADERS, as_cells(rows), left=2, form="simple"))
    for folder, reason in broken.items():
        print(f"left out: {folder}: {reason}", file=sys.stderr)


@app.command()
def compare(
    one: Annotated[str, typer.Argument(metavar="RUN", help="The directory of a run.")],
    other: Annotated[str, typer.Argument(metavar="RUN", help="The directory of another.")],
    out: Annotated[Path, typer.Option(help="Folder for the picture of both curves")] = Path("out"),
) -> None:
    """Compare two runs: settings that differ, results, and curves.

    The curves are drawn into compare.png and compare.svg.
    """
    from lrkv_jax.lab import overview
    from lrkv_jax.lab.report.comparison.files import read_runs
    from lrkv_jax.lab.report.figures import write_picture

    records = [record for path in (one, other) for record in read_runs([path])]
    if len(records) != 2:
        raise LrkvError(f"{one} and {other} hold {len(records)} runs: give the directories of two")
    first, second = records
    names = [first.path.name, second.path.name]
    settings = overview.setting_rows(first.config, second.config)
    print(tabulated(("setting", *names), settings, left=3, form="simple", widest=36))
    print()
    print(tabulated(("result", *names), overview.result_rows(first, second), form="simple"))
    print()
    if picture := overview.drawn(" and ".join(names), overview.curves(records)):
        print(write_picture(picture, out, "compare")[0])


@app.command()
def show(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG|RUN", help="A configuration, or a run's directory.")
    ],
    overrides: Overrides = None,
    diff: Annotated[
        str | None,
        typer.Option(metavar="CONFIG|RUN", help="Show only what differs from this one."),
    ] = None,
) -> None:
    """Show the resolved settings of a configuration or a run."""
    from lrkv_jax.config import dump_config, load_config
    from lrkv_jax.training.run_dir import read_run

    def read(place: str, changes: list[str]):
        return (read_run if Path(place).is_dir() else load_config)(place, changes)

    found = read(config, overrides or [])
    if diff is None:
        print(dump_config(found), end="")
        return
    from lrkv_jax.lab.overview import setting_rows

    rows = setting_rows(found, read(diff, []))
    headers = "setting", Path(config).stem, Path(diff).stem
    print(tabulated(headers, rows, left=3, form="simple", widest=36) if rows else "no difference")
