"""The paper: a file for each table or figure of it, and for those that stand beside it.

Each file registers what it makes (`lrkv_jax.artefacts.artefact`); `ARTEFACTS` are all of them in
the order of a page. `lrkv report RUN...` makes them.
"""

from lrkv_jax.artefacts.artefact import registered
from lrkv_jax.paper import (  # noqa: F401
    evolution,
    factorisation,
    fig02_loss_curves,
    fig03_training_efficiency,
    fig04_long_context_curves,
    fig05_rank_ablation,
    fig06_head_similarity,
    fig07_effective_rank,
    fig08_key_norms,
    fig10_pca_spectra,
    fig12_cumulative_variance,
    fig14_rank_by_layer,
    fig16_uncentred_spectra,
    fig19_downstream_correlation,
    overlap,
    seed_noise,
    similarity_gap,
    table01_pretraining,
    table02_downstream,
    table03_effective_rank,
    table04_mechanisms,
    table05_architectures,
    table06_training,
    table07_attention_configs,
    table08_rank_ablation,
    table09_long_context,
    table10_memory_latency,
    table11_cache_shapes,
    table12_cache_bytes,
    weighted_ranks,
)

ARTEFACTS = registered()
