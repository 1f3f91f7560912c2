"""ARC-Easy and ARC-Challenge, test splits: 2,376 and 1,172 science questions."""

from __future__ import annotations

from lrkv_jax.data.tasks import harness
from lrkv_jax.evals.multiple_choice import multiple_choice

# Choices differ in length: published scores are acc_norm.
easy = multiple_choice("arc_easy", harness.arc, normalised=True)
challenge = multiple_choice("arc_challenge", harness.arc, normalised=True)
