"""Figures 16 and 17: uncentred spectra of heads at an early, a middle and a late layer.

Lines are means over seeds, with orthogonal heads beside them; below, their distance from those on a
logarithmic axis.
"""

from lrkv_jax.artefacts.analysed import pictures
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.spectra import draw_spectra

TITLE = "Uncentred spectra of heads"


@artefact("Figures 16 and 17", TITLE, reads="analyses")
def fig16_uncentred_spectra(runs):
    return pictures(runs, TITLE, lambda group: draw_spectra(group, "uncentred", TITLE))
