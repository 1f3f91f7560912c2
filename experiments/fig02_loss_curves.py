"""Figure 2: held-out cross-entropy against training tokens, and against training FLOPs.

    python experiments/fig02_loss_curves.py RUN... --out DIR

A column for each scale; lines are means over seeds, bands one standard deviation. The upper axis is
MHA's FLOPs: other variants' tokens cost up to some per cent more or less.
"""

from lrkv_jax.artefacts import Artefact, command, curves, five_variants
from lrkv_jax.comparison import settings


def make(runs):
    return curves(TITLE, five_variants(settings(runs)), baseline="mha", gap="any scale")


TITLE = "Held-out loss during pretraining"
ARTEFACT = Artefact("fig02_loss_curves", TITLE, "Figure 2", make)

if __name__ == "__main__":
    command(ARTEFACT)
