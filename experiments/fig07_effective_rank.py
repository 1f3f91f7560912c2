"""Figures 7 and 9: effective rank of heads, uncentred and centred, as bars.

    python experiments/fig07_effective_rank.py RUN... --out DIR

Each bar is a mean over layers and seeds, beside random weights and under the cap.
Needs `lrkv analyze RUN`.
"""

from lrkv_jax.artefacts import command
from lrkv_jax.artefacts.heads import BARS

ARTEFACT = BARS

if __name__ == "__main__":
    command(ARTEFACT)
