"""How well a shared matrix and rank-R residuals fit a layer's heads: the best such fits
in closed form and by alternation, and the error that each would put into the logits.

H heads  D model width  K head width  R rank
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from lrkv_jax.errors import LrkvError
from lrkv_jax.interop import fits
from lrkv_jax.models.attention.head_weights import HeadWeights, SharedResidual

ITERATIONS = 300


def around(
    shared_DK: Float[np.ndarray, "D K"], family_HDK: Float[np.ndarray, "H D K"], rank: int
) -> SharedResidual:
    """A given shared part, and each head's deviation from it at rank R."""
    deviation_HDK = family_HDK - shared_DK
    rows_HKR = fits.leading(deviation_HDK.swapaxes(1, 2), rank)
    return SharedResidual(shared_DK, deviation_HDK @ rows_HKR, rows_HKR.swapaxes(1, 2))


def relative_error(
    family_HDK: Float[np.ndarray, "H D K"], approximation_HDK: Float[np.ndarray, "H D K"]
) -> float:
    """‖W − Ŵ‖ / ‖W‖ over all heads together (Frobenius)."""
    return float(np.linalg.norm(family_HDK - approximation_HDK) / np.linalg.norm(family_HDK))


def form_error(
    left_HDK: Float[np.ndarray, "H D K"],
    family_HDK: Float[np.ndarray, "H D K"],
    approximation_HDK: Float[np.ndarray, "H D K"],
) -> float:
    """‖L_h (W_h − Ŵ_h)ᵀ‖ / ‖L_h W_hᵀ‖ over all heads: of logits where L is the query, before norms.

    ‖L Eᵀ‖² = Σ (LᵀL) ∘ (EᵀE): no D × D matrix is made. It is the error of the logits of
    inputs with no preferred direction. 0 where the forms are zero.
    """

    def norm(right_HDK):
        products = (left_HDK.swapaxes(1, 2) @ left_HDK) * (right_HDK.swapaxes(1, 2) @ right_HDK)
        return max(float(products.sum()), 0.0) ** 0.5

    total = norm(family_HDK)
    return norm(family_HDK - approximation_HDK) / total if total else 0.0


def factorization(heads: HeadWeights, rank: int) -> dict[str, Any]:
    """{"key", "value"}: each of a layer's families against its approximations at rank R.

    `svd`, `mean_svd` and `alternating`. For each: the relative error, and the error of the forms
    (of the logits, for keys without MLA's rope part; of what heads write, for values). Raises
    `LrkvError` for a rank that such a matrix cannot have.
    """
    _, D, K = heads.key_HDK.shape
    if not 0 <= rank <= min(D, K):
        raise LrkvError(f"rank = {rank} of matrices {D} × {K}: use 0 to {min(D, K)}")
    return {
        "key": _errors(heads.key_HDK, heads.query_HDK, rank),
        "value": _errors(heads.value_HDK, heads.value_output()[1], rank),
    }


def _errors(
    family_HDK: Float[np.ndarray, "H D K"], left_HDK: Float[np.ndarray, "H D K"], rank: int
) -> dict[str, dict[str, float]]:
    shared = {
        "svd": np.zeros(family_HDK.shape[1:]),  # each W_h alone: optimal (Eckart & Young 1936)
        "mean_svd": family_HDK.mean(axis=0),  # not the optimum of this shape
        "alternating": fits.alternating(family_HDK, rank, iterations=ITERATIONS),
    }
    found = {}
    for name, shared_DK in shared.items():
        total_HDK = around(shared_DK, family_HDK, rank).total_HDK
        found[name] = {
            "error": relative_error(family_HDK, total_HDK),
            "form_error": form_error(left_HDK, family_HDK, total_HDK),
        }
    return found
