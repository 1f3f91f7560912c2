"""Every table and figure of the paper from these runs, with the decode benchmarks in `results/`.

    python experiments/paper.py [RUN]... [--only fig05] [--out DIR]

It is `lrkv report` with those benchmarks for Table 10.
"""

import sys
from pathlib import Path

from lrkv_jax.cli import main

if __name__ == "__main__":
    kept = sorted(Path(__file__).parent.glob("results/decode_*.json"))
    sys.argv = ["lrkv", "report", *sys.argv[1:], *(f"--bench={path}" for path in kept)]
    main()
