"""Described in the paper, not shown: the best shared matrix and residuals for trained heads.

    python experiments/factorisation.py RUN... --out DIR

Truncated SVD, mean + SVD and alternating least squares at the ranks that the runs were analysed
at, of MHA's heads and of LRKV's; and how LRKV divided its heads itself.
Needs `lrkv analyze RUN`.
"""

from lrkv_jax.artefacts import command
from lrkv_jax.artefacts.heads import FACTORISATION

ARTEFACT = FACTORISATION

if __name__ == "__main__":
    command(ARTEFACT)
