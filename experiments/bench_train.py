"""Training benchmarks, as docs/performance.md shows them: `python experiments/bench_train.py`.

On a CPU: the quickstart model whole, then layers of the 128M and the 24 x 1536 model, cut in depth,
vocabulary and batch as their tables say; about ten minutes on two idle cores. On GPUs: 128M and
24 x 1536 whole, some layers of 2.5B and 6.3B, and a step of 524,288 tokens. Writes
train_BACKEND-NAME.json into `--out FOLDER` (experiments/results) and, from all such files there,
the measured part of docs/performance.md; `--page-only` writes the page alone.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from lrkv_jax.bench.files import replace_between, save
from lrkv_jax.bench.report import run_shown
from lrkv_jax.bench.train import Settings, run
from lrkv_jax.bench.train_table import Row, markdown, print_report

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
BLOCK = "training steps"

# One sequence of 512 tokens, and a head that does not hide the layers.
CUT = ("train.batch=1", "train.accumulation=1", "train.context=512", "model.vocabulary=4096")
ON_CPU = {
    "quickstart": Settings(scales=("quickstart",), samples=9),
    "128m": Settings(
        scales=("128m",), ropes=("full",), overrides=CUT, depth=2, samples=5, data=False
    ),
    "24x1536": Settings(
        scales=("24x1536",), variants=("mha", "lrkv"), ropes=("full",), overrides=CUT, depth=1,
        samples=5, data=False,
    ),
}  # fmt: skip
ON_GPU = {
    "128m": Settings(samples=30),
    "24x1536": Settings(scales=("24x1536",), variants=("mha", "lrkv")),
    "36x2304": Settings(scales=("36x2304",), variants=("mha", "lrkv"), ropes=("full",), depth=8,
                        data=False),
    "6.3b": Settings(scales=("6.3b",), variants=("mha", "lrkv"), ropes=("full",), depth=4,
                     data=False),
    # Muon's share where a step is large.
    "128m-524288": Settings(variants=("mha", "lrkv"), ropes=("full",), samples=9, data=False,
                            overrides=("train.batch=256", "train.accumulation=16")),
}  # fmt: skip


def page_tables(folder: Path) -> str:
    """The measured part of the page, from every result in `folder`."""
    parts = []
    for backend, title in (("cpu", "On a CPU"), ("gpu", "On GPUs")):
        parts.append(f"### {title}\n")
        reports = [json.loads(path.read_text()) for path in results(folder, backend)]
        if not reports:
            parts.append("Nothing was measured.\n")
        parts += [markdown(report, _rows(report)) + "\n" for report in reports]
    return "\n".join(parts)


def results(folder: Path, backend: str) -> list[Path]:
    """The sweeps' files, in the order of the sweeps."""
    names = [f"train_{backend}-{name}.json" for name in (ON_CPU if backend == "cpu" else ON_GPU)]
    return [folder / name for name in names if (folder / name).is_file()]


def _rows(report: dict[str, Any]) -> list[Row]:
    return [Row(**row) for row in report["rows"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--only", choices=sorted(ON_CPU | ON_GPU), help="one of the sweeps")
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    sweeps = ON_CPU if jax.default_backend() == "cpu" else ON_GPU
    for name, settings in sweeps.items():
        if not options.page_only and options.only in (None, name):
            report = run_shown(run, settings, print_report, Console())
            for path in save(report, options.out, f"-{name}"):
                print(path)
    replace_between(PAGE, BLOCK, page_tables(options.out))
    print(PAGE)


if __name__ == "__main__":
    main()
