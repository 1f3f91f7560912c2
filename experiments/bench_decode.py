"""Decode benchmarks, as docs and README show them: `python experiments/bench_decode.py`.

On a CPU: attention alone at the 128M shape, uniform and ragged; then a layer of the 2.5B model
(36 x 2304): its memory, its time over MHA's, what exact RoPE costs. About four minutes on two
cores. On a GPU: four scales, batches to 64, lengths to 32,768. Writes decode_BACKEND.json and .png,
and the same with -ragged and -layer, into `--out FOLDER` (experiments/results).
"""

import argparse
from dataclasses import replace
from pathlib import Path

import jax
from rich.console import Console

from lrkv_jax.bench.decode import Settings, run
from lrkv_jax.bench.decode_table import print_report
from lrkv_jax.bench.files import save
from lrkv_jax.bench.report import run_shown

ATTENTION = Settings()
# MHA against the three modes; ours alone, as a layer runs on nothing else.
LAYER = Settings(
    scales=("36x2304",), variants=("mha", "lrkv"), batches=(4,), lengths=(8192,),
    implementations=("xla", "mosaic"), levels=("layer",),
)  # fmt: skip
RAGGED = replace(ATTENTION, batches=(4,), lengths=(2048, 8192), ragged=True)
ON_GPU = replace(
    ATTENTION,
    scales=("128m", "1.2b", "36x2304", "6.3b"),
    batches=(1, 8, 64),
    lengths=(512, 2048, 8192, 32768),
    samples=30,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    folder = parser.parse_args().out
    sweeps = {"": ATTENTION, "-ragged": RAGGED, "-layer": LAYER}
    if jax.default_backend() != "cpu":
        sweeps = {"": ON_GPU, "-ragged": replace(ON_GPU, ragged=True), "-layer": LAYER}
    for suffix, settings in sweeps.items():
        report = run_shown(run, settings, print_report, Console())
        for path in save(report, folder, suffix):
            print(path)


if __name__ == "__main__":
    main()
