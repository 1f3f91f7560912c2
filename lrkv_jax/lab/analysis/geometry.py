"""How LRKV's residuals lie against its shared part: cosines and principal angles.

H heads  D model width  K head width  R residual rank
"""

from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.linalg import orth, svdvals

from lrkv_jax.models.attention.head_weights import HeadWeights, SharedResidual


def cosines(parts: SharedResidual) -> Float[np.ndarray, "H"]:
    """⟨W_shared, U_h B_hᵀ⟩ / (‖W_shared‖ ‖U_h B_hᵀ‖) of each head; 0 where a norm is."""
    residual_HDK = parts.residual_HDK
    products_H = np.einsum("DK,HDK->H", parts.shared_DK, residual_HDK, optimize=True)
    norms_H = np.linalg.norm(parts.shared_DK) * np.linalg.norm(residual_HDK, axis=(1, 2))
    return np.divide(products_H, norms_H, out=np.zeros_like(norms_H), where=norms_H > 0)


def principal_cosines(first_DM: Float[np.ndarray, "D M"], second_DN: Float[np.ndarray, "D N"]):
    """Cosines of the principal angles between two column spaces, largest first: min(ranks) of them.

    Björck & Golub 1973: singular values of Q₁ᵀ Q₂ for orthonormal bases Q, exact to rounding.
    """
    # scipy's subspace_angles is for the angles: it leaves 1.5e-8 in the cosine of a right angle.
    return np.clip(svdvals(orth(first_DM).T @ orth(second_DN)), 0.0, 1.0)


def geometry(heads: HeadWeights, *, isotropic: bool = True) -> dict[str, Any] | None:
    """{"key", "value"} of a layer with parts; None for variants that have none.

    `cosine` is each head's; a random residual's has mean 0 and standard deviation 1/√(D K),
    `cosine_null_sd`. `principal_cosines` are R per head, between the columns of W_shared, K
    dimensions of D, and those of U_h; a random U_h has the mean square K / D, `mean_square_null`.
    The nulls are None for weighted heads (`isotropic` False), for which they do not hold. All are
    the same for U G, B G⁻ᵀ. Row spaces are not compared: W_shared's is all K dimensions.
    """
    if heads.key_parts is None:
        return None
    parts = {"key": heads.key_parts, "value": heads.value_parts}
    return {name: _geometry(part, isotropic) for name, part in parts.items()}


def _geometry(parts: SharedResidual, isotropic: bool) -> dict[str, Any]:
    D, K = parts.shared_DK.shape
    cosines_H = cosines(parts)
    principal = [principal_cosines(parts.shared_DK, down_DR) for down_DR in parts.down_HDR]
    squares = np.concatenate(principal) ** 2
    return {
        "cosine": cosines_H.tolist(),
        "mean_cosine": float(cosines_H.mean()),
        "mean_absolute_cosine": float(np.abs(cosines_H).mean()),
        "cosine_null_sd": (D * K) ** -0.5 if isotropic else None,
        "principal_cosines": [values.tolist() for values in principal],
        "mean_square": float(squares.mean()),
        "mean_square_null": min(K / D, 1.0) if isotropic else None,
    }
