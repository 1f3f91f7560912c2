"""Every table and figure of these runs on one page.

    python experiments/report.py RUN... --out DIR

Each script of this folder that has an ARTEFACT makes its files in DIR and its section of
DIR/report.html, which needs nothing beside itself. Without runs, gaps say what is missing.
"""

import argparse
import importlib.util
import sys
import time
from pathlib import Path

from lrkv_jax.artefacts import Section, page, write
from lrkv_jax.comparison import read_runs
from lrkv_jax.errors import EXIT_BAD_INPUT, LrkvError

HERE = Path(__file__).parent


def artefacts():
    """The ARTEFACT of each script here, in the order of their names: figures, then tables."""
    for path in sorted(HERE.glob("*.py")):
        # Read before it is run: a benchmark beside them has none, and is left alone.
        if "\nARTEFACT = " in path.read_text(encoding="utf-8"):
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            yield module.ARTEFACT


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run, or a folder of runs")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where files go (out)")
    parser.add_argument("--title", default="Low-rank key-value attention: tables and figures")
    given = parser.parse_args()
    began = time.monotonic()
    try:
        runs = read_runs(given.runs)
        sections = []
        for artefact in artefacts():
            made = artefact.made(runs)
            write(artefact, made, given.out)
            sections.append(Section.of(artefact, made))
            print(f"{artefact.name}: {len(sections[-1].gaps)} gaps", file=sys.stderr)
    except LrkvError as error:
        print(f"report: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    scales = ", ".join(dict.fromkeys(run.scale for run in runs)) or "none"
    about = f"{len(runs)} runs of these scales: {scales}."
    path = given.out / "report.html"
    path.write_text(page(given.title, sections, about=about), encoding="utf-8")
    print(f"{path}, {path.stat().st_size / 1e6:.1f} MB, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
