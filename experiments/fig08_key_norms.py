"""Figure 8: Frobenius norms of keys and values by layer.

    python experiments/fig08_key_norms.py RUN... --out DIR

MHA's, and LRKV's shared part, residual and total; the paper says 3.1 to 6.7 times MHA's in one
place and 4 to 5 in another.
Needs `lrkv analyze RUN`.
"""

from lrkv_jax.artefacts import command
from lrkv_jax.artefacts.heads import NORMS

ARTEFACT = NORMS

if __name__ == "__main__":
    command(ARTEFACT)
