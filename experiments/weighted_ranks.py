"""Beside the paper: effective ranks of heads as held-out text meets them, and random weights'.

python experiments/weighted_ranks.py RUN... --out DIR

Reads `analysis.json`, which `lrkv analyze RUN... --batches 4` writes.
"""

from lrkv_jax.artefacts import command
from lrkv_jax.artefacts.heads import WEIGHTED

ARTEFACT = WEIGHTED

if __name__ == "__main__":
    command(ARTEFACT)
