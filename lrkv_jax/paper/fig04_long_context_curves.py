"""Figure 4: held-out cross-entropy during pretraining at a context of 8,192 tokens.

Of the runs it is given, it draws those of that context as Figure 2 draws all.
"""

from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.losses import curves_by_kind
from lrkv_jax.comparison import settings

CONTEXT = 8192
TITLE = "Held-out loss at a context of 8,192"


@artefact("Figure 4", TITLE)
def fig04_long_context_curves(runs):
    long = settings([run for run in runs if run.config.train.context == CONTEXT])
    return curves_by_kind(TITLE, long, f"a context of {CONTEXT:,}")
