"""Figures 14 and 15: effective rank of heads by layer, uncentred beside centred.

    python experiments/fig14_rank_by_layer.py RUN... --out DIR

Lines are means over seeds, between the cap and what random weights come to.
Needs `lrkv analyze RUN`.
"""

from lrkv_jax.artefacts import command
from lrkv_jax.artefacts.heads import BY_LAYER

ARTEFACT = BY_LAYER

if __name__ == "__main__":
    command(ARTEFACT)
