"""Figures 12 and 13: cumulative variance of heads at an early, a middle and a late layer.

    python experiments/fig12_cumulative_variance.py RUN... --out DIR

Lines are means over seeds; 90 % and orthogonal heads are drawn beside.
Needs `lrkv analyze RUN`.
"""

from lrkv_jax.artefacts import command
from lrkv_jax.artefacts.heads import CUMULATIVE

ARTEFACT = CUMULATIVE

if __name__ == "__main__":
    command(ARTEFACT)
