"""`lrkv doctor`: what this machine is, and whether it is right for the work."""

import json
import sys
from typing import Annotated

import typer

from lrkv_jax.cli.shared import Json, app
from lrkv_jax.errors import EXIT_BAD_INPUT


@app.command()
def doctor(
    seconds: Annotated[
        int, typer.Option(min=1, help="Begin no check, and end the one that runs, after this time.")
    ] = 115,
    as_json: Json = False,
) -> None:
    """Examine this machine.

    It checks versions, devices and speeds. Each line is ok, slow or
    wrong, with the fix, or not here. It takes less than two minutes, and exits with 2 if something
    is wrong.
    """
    from lrkv_jax.lab.doctor.examine import examine, sentence
    from lrkv_jax.lab.doctor.finding import WRONG

    def show(finding) -> None:
        print(finding, file=sys.stderr if as_json else sys.stdout, flush=True)

    report = examine(show, seconds=seconds)
    print(json.dumps(report, indent=2) if as_json else sentence(report))
    sys.exit(EXIT_BAD_INPUT if report["doctor"] == WRONG else 0)
