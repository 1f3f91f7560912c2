"""Frobenius norms of a layer's key and value matrices, and of the parts that LRKV has."""

import numpy as np

from lrkv_jax.models.attention.head_weights import HeadWeights, SharedResidual


def magnitude(heads: HeadWeights) -> dict[str, dict[str, float | None]]:
    """{"key", "value"}: ‖W_h‖ ("total"), ‖W_shared‖ and ‖U_h B_hᵀ‖ ("residual"), mean over heads.

    Shared and residual are None where the variant has no such parts. ‖W_h‖² is not the sum of
    their squares unless they are orthogonal (`lrkv_jax.lab.analysis.geometry`). QK-norm hides the
    norm of a key from its logits; nothing hides a value's.
    """
    return {
        "key": _norms(heads.key_HDK, heads.key_parts),
        "value": _norms(heads.value_HDK, heads.value_parts),
    }


def _norms(total_HDK: np.ndarray, parts: SharedResidual | None) -> dict[str, float | None]:
    norms = {"total": _mean_norm(total_HDK), "shared": None, "residual": None}
    if parts is not None:
        norms["shared"] = float(np.linalg.norm(parts.shared_DK))
        norms["residual"] = _mean_norm(parts.residual_HDK)
    return norms


def _mean_norm(matrices_HDK: np.ndarray) -> float:
    return float(np.mean(np.linalg.norm(matrices_HDK, axis=(1, 2))))
