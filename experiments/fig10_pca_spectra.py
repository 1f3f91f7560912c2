"""Figures 10 and 11: centred (PCA) spectra of heads at an early, a middle and a late layer.

    python experiments/fig10_pca_spectra.py RUN... --out DIR

Lines are means over seeds; orthogonal heads are drawn beside.
Needs `lrkv analyze RUN`.
"""

from lrkv_jax.artefacts import command
from lrkv_jax.artefacts.heads import PCA

ARTEFACT = PCA

if __name__ == "__main__":
    command(ARTEFACT)
