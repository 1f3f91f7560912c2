"""What trained heads look like: how diverse, how large, how well factored (`docs/analysis.md`)."""

from lrkv_jax.analysis.run import analyse, analyse_steps, head_diversity
from lrkv_jax.analysis.weights import head_weights
