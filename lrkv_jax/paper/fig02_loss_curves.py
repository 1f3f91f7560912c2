"""Figure 2: held-out cross-entropy against training tokens, and against training FLOPs.

A column for each scale; lines are means over seeds, bands one standard deviation. The upper axis
shows MHA's FLOPs: a token of another variant costs up to some per cent more or less.
"""

from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.losses import curves_by_kind
from lrkv_jax.comparison import settings

TITLE = "Held-out loss during pretraining"


@artefact("Figure 2", TITLE)
def fig02_loss_curves(runs):
    return curves_by_kind(TITLE, settings(runs), "any scale")
