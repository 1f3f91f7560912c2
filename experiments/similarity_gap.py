"""Described in the paper, not shown: mean similarity of heads by layer, each variant less MHA.

    python experiments/similarity_gap.py RUN... --out DIR

The paper puts LRKV within 0.02 to 0.04 of MHA; the noise of random layers is drawn beside.
Needs `lrkv analyze RUN`.
"""

from lrkv_jax.artefacts import command
from lrkv_jax.artefacts.heads import GAP

ARTEFACT = GAP

if __name__ == "__main__":
    command(ARTEFACT)
