"""Figures 10 and 11: centred (PCA) spectra of heads at an early, a middle and a late layer.

Lines are means over seeds, with orthogonal heads beside them; below, their distance from those on a
logarithmic axis.
"""

from lrkv_jax.artefacts.analysed import pictures
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.spectra import draw_spectra

TITLE = "PCA spectra of heads"


@artefact("Figures 10 and 11", TITLE, reads="analyses")
def fig10_pca_spectra(runs):
    return pictures(runs, TITLE, lambda group: draw_spectra(group, "centred", TITLE))
