"""Training benchmarks, as docs/performance.md shows them: `python experiments/bench_train.py`.

The quickstart model whole, then layers of the 128M and the 24 x 1536 model, cut in depth,
vocabulary and batch as their tables say; about ten minutes on two idle CPU cores. Writes
train_cpu-NAME.json into `--out FOLDER` (experiments/results) and, from all such files there, the
part of docs/performance.md that is of a CPU; `--page-only` writes the page alone. On a GPU:
`first_light.py`.
"""

import argparse
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from lrkv_jax.lab.bench.report import replace_between, run_shown, save
from lrkv_jax.lab.bench.train import TrainBenchmark, run
from lrkv_jax.lab.bench.train_table import TrainTiming, markdown, print_report

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
BLOCK = "training steps"

# One sequence of 512 tokens, and a head that does not hide the layers.
CUT = (
    "train.global_batch_size=1",
    "train.grad_accum_steps=1",
    "train.seq_len=512",
    "model.vocabulary=4096",
)
SWEEPS = {
    "quickstart": TrainBenchmark(scales=("quickstart",), samples=9),
    "128m": TrainBenchmark(
        scales=("128m",), ropes=("full", "latent"), overrides=CUT, depth=2, samples=5
    ),
    "24x1536": TrainBenchmark(
        scales=("24x1536",), variants=("mha", "lrkv"), ropes=("full", "latent"), overrides=CUT,
        depth=1, samples=5,
    ),
}  # fmt: skip


def page_tables(folder: Path) -> str:
    """The measured part of the page, from every result in `folder`."""
    reports = [json.loads(path.read_text()) for path in results(folder)]
    return "\n".join(["### On a CPU\n", *(markdown(r, _rows(r)) + "\n" for r in reports)])


def results(folder: Path) -> list[Path]:
    """The sweeps' files, in the order of the sweeps."""
    paths = [folder / f"train_cpu-{name}.json" for name in SWEEPS]
    return [path for path in paths if path.is_file()]


def _rows(report: dict[str, Any]) -> list[TrainTiming]:
    known = {field.name for field in fields(TrainTiming)}  # kept files may have more
    return [TrainTiming(**{k: v for k, v in row.items() if k in known}) for row in report["rows"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--only", choices=sorted(SWEEPS), help="one of the sweeps")
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    for name, settings in SWEEPS.items():
        if not options.page_only and options.only in (None, name):
            report = run_shown(run, settings, print_report, Console())
            for path in save(report, options.out, f"-{name}"):
                print(path)
    replace_between(PAGE, BLOCK, page_tables(options.out))
    print(PAGE)


if __name__ == "__main__":
    main()
