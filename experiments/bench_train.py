"""Training benchmarks, as docs/planning.md shows them: `python experiments/bench_train.py`.

The quickstart model whole, then layers of the 128M and the 1.2B model, cut in depth, vocabulary and
batch as their tables say; about ten minutes on two idle CPU cores. Writes train_cpu-NAME.json into
`--out FOLDER` (experiments/results) and, from all such files there, the part of docs/planning.md
that is of a CPU; `--page-only` writes the page alone. On a GPU: `first_light.py`.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from lrkv_jax.cli.shared import working
from lrkv_jax.lab.bench.report import command, replace_between
from lrkv_jax.lab.bench.train import TrainBenchmark, TrainTiming, run, tables

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "planning.md"
BLOCK = "training steps"

# One sequence of 512 tokens, and a head that does not hide the layers.
CUT = ("train.global_batch_size=1", "train.grad_accum_steps=1", "train.seq_len=512",
       "model.vocabulary=4096")  # fmt: skip
SWEEPS = {
    "quickstart": TrainBenchmark(scales=("quickstart",), samples=9),
    "128m": TrainBenchmark(scales=("128m",), overrides=CUT, depth=2, samples=5),
    "1.2b": TrainBenchmark(
        scales=("1.2b",), variants=("mha", "lrkv", "lrkv_latent"), overrides=CUT, depth=1, samples=5
    ),
}


def page_tables(folder: Path) -> str:
    """The measured part of the page, from every result in `folder`."""
    paths = [folder / f"train_cpu-{name}.json" for name in SWEEPS]
    reports = [json.loads(path.read_text()) for path in paths if path.is_file()]
    for one in reports:
        one["rows"] = [TrainTiming(**row) for row in one["rows"]]
    return "\n\n".join(["### On a CPU", *(tables(one, "pipe") for one in reports)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--only", choices=sorted(SWEEPS), help="one of the sweeps")
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    options = parser.parse_args()
    for name, settings in SWEEPS.items():
        if not options.page_only and options.only in (None, name):
            how = {"print_json": False, "out": options.out, "suffix": f"-{name}"}
            command(run, settings, tables, working("measuring"), **how)
    replace_between(PAGE, BLOCK, page_tables(options.out))
    print(PAGE)


if __name__ == "__main__":
    main()
