"""MMLU, test split: 14,042 questions of 57 subjects, overall (each question alike) and for each."""

from __future__ import annotations

from lrkv_jax.data.tasks import harness
from lrkv_jax.evals.multiple_choice import multiple_choice

# Continuations are letters, all of one length.
mmlu = multiple_choice("mmlu", harness.mmlu, normalised=False)
