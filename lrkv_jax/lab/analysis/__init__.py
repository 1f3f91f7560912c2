"""What trained heads look like: how diverse, how large, how well factored (`docs/analysis.md`)."""

from lrkv_jax.lab.analysis.heads import head_weights
from lrkv_jax.lab.analysis.run import analyze, head_diversity
