"""Described in the paper, not shown: how LRKV's residuals lie against its shared part.

    python experiments/overlap.py RUN... --out DIR

Cosines (the paper says 0.2 to 0.4) and principal angles by layer, beside random residuals.
Needs `lrkv analyze RUN`.
"""

from lrkv_jax.artefacts import command
from lrkv_jax.artefacts.heads import OVERLAP

ARTEFACT = OVERLAP

if __name__ == "__main__":
    command(ARTEFACT)
