"""Figure 4: held-out cross-entropy during pretraining at a context of 8,192 tokens.

    python experiments/fig04_long_context_curves.py RUN... --out DIR

Of the runs it is given, those of that context; drawn as Figure 2 is.
"""

from lrkv_jax.artefacts import Artefact, command, curves, five_variants
from lrkv_jax.comparison import settings

CONTEXT = 8192


def make(runs):
    long = settings([run for run in runs if run.config.train.context == CONTEXT])
    return curves(TITLE, five_variants(long), baseline="mha", gap=f"a context of {CONTEXT:,}")


TITLE = "Held-out loss at a context of 8,192"
ARTEFACT = Artefact("fig04_long_context_curves", TITLE, "Figure 4", make)

if __name__ == "__main__":
    command(ARTEFACT)
