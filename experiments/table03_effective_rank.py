"""Table 3: effective rank of heads, uncentred and centred.

    python experiments/table03_effective_rank.py RUN... --out DIR

Counts, % of heads (the paper's convention), % of the cap that centring leaves, the random-weights
null, components for 90 %, and what centring changes against cap and null. The paper's own values
stand in a table of their own, with % of cap recomputed.
Needs `lrkv analyze RUN`.
"""

from lrkv_jax.artefacts import command
from lrkv_jax.artefacts.heads import RANKS

ARTEFACT = RANKS

if __name__ == "__main__":
    command(ARTEFACT)
