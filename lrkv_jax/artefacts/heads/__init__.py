"""What analysed runs' heads look like: `lrkv analyze` and scripts of `experiments/` draw these."""

from lrkv_jax.artefacts.heads.fits import FACTORISATION
from lrkv_jax.artefacts.heads.norms import NORMS
from lrkv_jax.artefacts.heads.overlap import OVERLAP
from lrkv_jax.artefacts.heads.rank_table import RANKS
from lrkv_jax.artefacts.heads.ranks import BARS, BY_LAYER
from lrkv_jax.artefacts.heads.similarity import GAP, MAPS
from lrkv_jax.artefacts.heads.spectra import CUMULATIVE, PCA, UNCENTRED
from lrkv_jax.artefacts.heads.weighted import WEIGHTED

ARTEFACTS = (
    RANKS, WEIGHTED, BARS, BY_LAYER, MAPS, GAP, PCA, CUMULATIVE, UNCENTRED, NORMS, OVERLAP,
    FACTORISATION,
)  # fmt: skip

__all__ = [
    "ARTEFACTS",
    "BARS",
    "BY_LAYER",
    "CUMULATIVE",
    "FACTORISATION",
    "GAP",
    "MAPS",
    "NORMS",
    "OVERLAP",
    "PCA",
    "RANKS",
    "UNCENTRED",
    "WEIGHTED",
]
