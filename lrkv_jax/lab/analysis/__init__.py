"""Statistics of trained heads: diversity, size and factorization (`docs/analysis.md`)."""

from lrkv_jax.lab.analysis.heads import head_weights
from lrkv_jax.lab.analysis.run import analyze, head_diversity
