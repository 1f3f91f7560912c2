"""Decode benchmarks, as the docs show them: `python experiments/bench_decode.py`.

Attention at the shapes of 128m, 1.2b and 2.5b, ragged at the first, and of every variant of
128m_family. Minutes, on two CPU cores. Writes decode_cpu-NAME.json into `--out FOLDER`
(experiments/results), or `--only` one of them. On a GPU: `first_light.py`.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from lrkv_jax.lab.bench.decode import DecodeBenchmark, run, tables
from lrkv_jax.lab.bench.report import command

ATTENTION = DecodeBenchmark(implementations=("xla", "mosaic", "jax"))
LONG = replace(ATTENTION, lengths=(2048, 8192))
SWEEPS = {
    "128m": ATTENTION,
    "1.2b": replace(LONG, scales=("1.2b",), samples=15),
    "2.5b": replace(LONG, scales=("2.5b",), samples=15),
    # For `lrkv report --only choosing`.
    "family": replace(LONG, scales=("128m_family",)),
    "ragged": replace(LONG, batches=(4,), ragged=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--only", choices=list(SWEEPS))
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else SWEEPS:
        command(run, SWEEPS[name], tables, print_json=False, out=arguments.out, suffix=f"-{name}")


if __name__ == "__main__":
    main()
