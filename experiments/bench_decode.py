"""Decode benchmarks, as the docs show them: `python experiments/bench_decode.py`.

Attention alone at the shapes of 128m, 24x1536 and 36x2304, and ragged at the first. Minutes, on two
CPU cores. Writes decode_cpu.json and .png, and the same with -24x1536, -36x2304, -family and
-ragged, into `--out FOLDER` (experiments/results), or `--only` one of them. On a GPU:
`first_light.py`.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from rich.console import Console

from lrkv_jax.lab.bench.decode import DecodeBenchmark, run
from lrkv_jax.lab.bench.decode_plot import draw
from lrkv_jax.lab.bench.decode_table import print_report
from lrkv_jax.lab.bench.report import run_shown, save

ATTENTION = DecodeBenchmark()
WIDE = {
    scale: replace(
        ATTENTION, scales=(scale,), lengths=(2048, 8192), implementations=("xla", "mosaic", "jax"),
        samples=15,
    )
    for scale in ("24x1536", "36x2304")
}  # fmt: skip
# Every variant as it stands there, for `lrkv report --only choosing`.
FAMILY = replace(
    ATTENTION, scales=("128m_family",), ropes=("own",), lengths=(2048, 8192),
    implementations=("xla", "mosaic", "jax"),
)  # fmt: skip
RAGGED = replace(ATTENTION, batches=(4,), lengths=(2048, 8192), ragged=True)


SWEEPS = {"128m": ATTENTION, **WIDE, "family": FAMILY, "ragged": RAGGED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", choices=list(SWEEPS))
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else SWEEPS:
        report = run_shown(run, SWEEPS[name], print_report, Console())
        suffix = "" if name == "128m" else f"-{name}"
        for path in save(report, arguments.out, suffix, draw=draw):
            print(path)


if __name__ == "__main__":
    main()
