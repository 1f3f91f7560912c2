"""One artefact of the paper: what makes it, and the command that every script of one is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lrkv_jax.artefacts.figure import Picture, style, write_picture
from lrkv_jax.artefacts.table import Table
from lrkv_jax.artefacts.written import write_table
from lrkv_jax.comparison import RunRecord, read_runs
from lrkv_jax.errors import EXIT_BAD_INPUT, LrkvError

Made = Table | Picture


@dataclass(frozen=True)
class Artefact:
    """A table or figure of the paper.

    `name` is its script's and its files'; `paper` says where it stands there, as in "Figure 2";
    `make` turns runs, of any number, into one or several tables and pictures.
    """

    name: str
    title: str
    paper: str
    make: Callable[[Sequence[RunRecord]], Made | Iterable[Made]]

    def made(self, runs: Sequence[RunRecord]) -> list[Made]:
        """Its tables and pictures of these runs."""
        with style():
            result = self.make(runs)
            return [result] if isinstance(result, Table | Picture) else list(result)


def write(artefact: Artefact, made: Sequence[Made], out: Path) -> list[Path]:
    """Write what was made into a folder: tables as Markdown, LaTeX and JSON; PNG and SVG."""
    paths = []
    for one in made:
        name = f"{artefact.name}_{one.name}" if one.name else artefact.name
        writer = write_table if isinstance(one, Table) else write_picture
        paths += writer(one, out, name)
    return paths


def command(artefact: Artefact, arguments: Sequence[str] | None = None) -> None:
    """A script's command: `python experiments/NAME.py RUN... --out DIR`.

    Prints what it wrote and which gaps are left; a user's error is one line and exit code 2.
    """
    parser = argparse.ArgumentParser(description=f"{artefact.paper}: {artefact.title}.")
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="a run's directory, or a folder of runs"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="where files go (out)")
    given = parser.parse_args(arguments)
    try:
        made = artefact.made(read_runs(given.runs))
        for path in write(artefact, made, given.out):
            print(path)
    except LrkvError as error:
        print(f"{artefact.name}: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    for gap in dict.fromkeys(gap for one in made for gap in one.gaps):
        print(f"gap: {gap}", file=sys.stderr)
