"""Figures 6 and 18: heat maps of the cosines of heads at an early, a middle and a late layer.

    python experiments/fig06_head_similarity.py RUN... --out DIR

One picture for each scale, a row for each variant at its lowest seed, one scale of colours.
Needs `lrkv analyze RUN`.
"""

from lrkv_jax.artefacts import command
from lrkv_jax.artefacts.heads import MAPS

ARTEFACT = MAPS

if __name__ == "__main__":
    command(ARTEFACT)
