"""What trained heads look like: how diverse, how large, how well factored (`docs/analysis.md`)."""

from lrkv_jax.lab.analysis.run import analyse, analyse_steps, head_diversity
from lrkv_jax.lab.analysis.weights import head_weights
