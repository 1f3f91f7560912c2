"""Figures 16 and 17: uncentred spectra of heads at an early, a middle and a late layer.

    python experiments/fig16_uncentred_spectra.py RUN... --out DIR

Lines are means over seeds; orthogonal heads are drawn beside.
Needs `lrkv analyze RUN`.
"""

from lrkv_jax.artefacts import command
from lrkv_jax.artefacts.heads import UNCENTRED

ARTEFACT = UNCENTRED

if __name__ == "__main__":
    command(ARTEFACT)
