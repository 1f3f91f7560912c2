"""How well a shared matrix and rank-R residuals fit a layer's heads: the best such fits in closed
form and by alternation, and the error that each would put into the logits. And how much of them a
shared matrix alone explains, before and after heads are aligned.

H heads  D model width  K head width  R rank  J rope pairs, K // 2
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from lrkv_jax.attention.head_weights import HeadWeights, SharedResidual
from lrkv_jax.errors import LrkvError

ITERATIONS = 300
STEADY = 1e-5  # the relative fall of the error in one iteration below which the alternation ends
EXACT = 1e-15  # a relative error that is rounding
FREE = 1e-10  # eigenvalues, of a mean of projections, below which a direction of W_shared is free


def truncated_svd(family_HDK: Float[np.ndarray, "H D K"], rank: int) -> SharedResidual:
    """Each W_h by itself at rank R, with nothing shared: optimal (Eckart & Young 1936)."""
    return around(np.zeros(family_HDK.shape[1:]), family_HDK, rank)


def mean_and_svd(family_HDK: Float[np.ndarray, "H D K"], rank: int) -> SharedResidual:
    """The heads' mean, and each deviation from it at rank R: not the optimum of this shape."""
    return around(family_HDK.mean(axis=0), family_HDK, rank)


def alternating(
    family_HDK: Float[np.ndarray, "H D K"], rank: int, *, iterations: int = ITERATIONS
) -> SharedResidual:
    """The least-squares fit of W_shared + U_h B_hᵀ to the heads, by alternation from their mean.

    For orthonormal rows B_hᵀ the best U_h is (W_h − W_shared) B_h, and what is left to minimise is
    Σ ‖(W_h − W_shared)(1 − P_h)‖², P_h = B_h B_hᵀ. Each of two steps does so exactly: P_h from the
    SVD of W_h − W_shared, and W_shared = Σ W_h (1 − P_h) · (Σ (1 − P_h))⁻¹, which moves U_h along.
    (The usual second step, the mean of W_h − U_h B_hᵀ at fixed residuals, needs three times the
    iterations.) The error never rises and is at most `mean_and_svd`'s. It ends at a stationary
    point, which nothing proves to be the best. Families of this shape are found to rounding in 16
    to 80 iterations where R ≤ K / 2 and H ≥ 4; for three heads at R = K / 2 the last percent takes
    thousands.
    """
    shared_DK = family_HDK.mean(axis=0)
    K, before = family_HDK.shape[2], np.inf
    exact = EXACT**2 * float(np.sum(family_HDK**2))
    for _ in range(iterations):
        deviation_HDK = family_HDK - shared_DK
        rows_HKR = _rows(deviation_HDK, rank)
        rest_HKK = np.eye(K) - rows_HKR @ rows_HKR.swapaxes(1, 2)
        left_HDK = deviation_HDK @ rest_HKK
        left = float(np.sum(left_HDK**2))
        if left <= exact or left > before * (1 - STEADY) ** 2:
            break
        before = left
        values_K, vectors_KK = np.linalg.eigh(rest_HKK.mean(axis=0))
        # A direction that is in every residual leaves W_shared free: it stays as it is there.
        inverse_K = np.divide(1.0, values_K, out=np.zeros(K), where=values_K > FREE)
        shared_DK = shared_DK + left_HDK.mean(axis=0) @ (vectors_KK * inverse_K) @ vectors_KK.T
    return around(shared_DK, family_HDK, rank)


def around(
    shared_DK: Float[np.ndarray, "D K"], family_HDK: Float[np.ndarray, "H D K"], rank: int
) -> SharedResidual:
    """A given shared part, and each head's deviation from it at rank R.

    Raises `LrkvError` for a rank that such a matrix cannot have.
    """
    _, D, K = family_HDK.shape
    if not 0 <= rank <= min(D, K):
        raise LrkvError(f"rank = {rank} of matrices {D} × {K}: use 0 to {min(D, K)}")
    deviation_HDK = family_HDK - shared_DK
    rows_HKR = _rows(deviation_HDK, rank)
    return SharedResidual(shared_DK, deviation_HDK @ rows_HKR, rows_HKR.swapaxes(1, 2))


def _rows(matrices_HDK, rank):
    """Orthonormal [H, K, R]: the leading right singular vectors.

    They are eigenvectors of the K × K products, which costs a tenth of the SVD of D × K. Squaring
    leaves singular values below 1e-8 of the largest in no order; so small an error they are.
    """
    products_HKK = matrices_HDK.swapaxes(1, 2) @ matrices_HDK
    return np.linalg.eigh(products_HKK)[1][:, :, products_HKK.shape[-1] - rank :]


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

    ‖L Eᵀ‖² = Σ (LᵀL) ∘ (EᵀE): no D × D matrix is made. It is the error of the logits of inputs with
    no preferred direction. 0 where the forms are zero.
    """

    def norm(right_HDK):
        products = (left_HDK.swapaxes(1, 2) @ left_HDK) * (right_HDK.swapaxes(1, 2) @ right_HDK)
        return max(float(products.sum()), 0.0) ** 0.5

    whole = norm(family_HDK)
    return norm(family_HDK - approximation_HDK) / whole if whole else 0.0


def shared_energy(heads: HeadWeights) -> dict[str, dict[str, float]]:
    """{"key", "value"}: the share of Σ ‖W_h‖² that one matrix M for all heads explains.

    `raw`: M is the heads' mean, H ‖M‖² / Σ ‖W_h‖². `aligned`: each head is first moved as the model
    allows without a change of its outputs.

    - Keys: `turned_keys`, which a query turned in the same way hides from logits at every offset,
      with QK-norm too, unless that has gains. MLA's modes `decoupled` and `latent` allow any
      rotation of keys, and theirs is a lower bound.
    - Values: any K × K matrix per head, whose inverse the output projection can absorb. What is
      then explained is the least-squares fit W_h ≈ M A_h: M is the best K dimensions of D for all
      heads together, their leading left singular vectors, and A_h = Mᵀ W_h. This is the optimum.

    `aligned` is not below `raw`. Heads that are one matrix in different bases have 1.
    """

    def share(explained, family_HDK):
        return min(float(explained / np.sum(family_HDK**2)), 1.0)  # but for rounding

    def raw(family_HDK):
        return len(family_HDK) * np.sum(family_HDK.mean(axis=0) ** 2)

    keys, values = heads.key_HDK, heads.value_HDK
    all_DN = np.concatenate(values, axis=1)  # N = H·K; of D × D and N × N the smaller is cheaper
    smaller = all_DN.T @ all_DN if all_DN.shape[1] < len(all_DN) else all_DN @ all_DN.T
    best = np.linalg.eigvalsh(smaller)[-values.shape[2] :].sum()
    return {
        "key": {"raw": share(raw(keys), keys), "aligned": share(raw(turned_keys(keys)), keys)},
        "value": {"raw": share(raw(values), values), "aligned": share(best, values)},
    }


def turned_keys(
    family_HDK: Float[np.ndarray, "H D K"], *, iterations: int = ITERATIONS
) -> Float[np.ndarray, "H D K"]:
    """Keys whose every rope pair (j, j + J) is turned by an angle, to be most like other heads'.

    A pair's two columns are one complex vector z_h, and its rotation a phase u_h. Alternating least
    squares minimises Σ ‖u_h z_h − m‖² for each pair by itself: m is the mean, and u_h the phase of
    ⟨z_h, m⟩. It begins at the phases of the leading eigenvector of all ⟨z_h, z_i⟩, and at no
    rotation, and the better end of the two is kept; one that is better yet may exist. An odd last
    coordinate, which rope leaves alone, stays as it is.
    """
    H, D, K = family_HDK.shape
    J = K // 2
    z_HDJ = family_HDK[:, :, :J] + 1j * family_HDK[:, :, J : 2 * J]
    gram_JHH = np.einsum("HDJ,IDJ->JHI", z_HDJ.conj(), z_HDJ, optimize=True)
    starts = np.stack([np.ones((J, H), complex), np.linalg.eigh(gram_JHH)[1][:, :, -1]])
    phases_NJH, before = _phase(starts), 0.0
    for _ in range(iterations):
        means_NJH = (gram_JHH @ phases_NJH[..., None])[..., 0]
        explained_NJ = (phases_NJH.conj() * means_NJH).sum(axis=-1).real
        if explained_NJ.sum() <= before * (1 + EXACT):
            break
        phases_NJH, before = _phase(means_NJH), float(explained_NJ.sum())
    phases_JH = phases_NJH[explained_NJ.argmax(axis=0), np.arange(J)]
    turned_HDJ = z_HDJ * phases_JH.T[:, None]
    return np.concatenate([turned_HDJ.real, turned_HDJ.imag, family_HDK[:, :, 2 * J :]], axis=2)


def _phase(z):
    """z / |z|, and 1 for 0."""
    return np.exp(1j * np.angle(z))


def factorisation(heads: HeadWeights, rank: int) -> dict[str, Any]:
    """{"key", "value"}: each of a layer's families against its approximations at rank R.

    For each of `svd`, `mean_svd`, `alternating` and, of LRKV, `learned` (its own shared part, and
    residuals cut to rank R: no error at its own rank): the relative error, the error of the forms
    (of the logits, for keys without MLA's rope part; of what heads write, for values), what shares
    of Σ ‖W_h‖² the shared part, counted H times, and the residuals hold (not 1 together unless they
    are orthogonal), and the cosine of the shared part with the heads' mean.
    """
    query_HDK, output_HDK = heads.query_HDK, heads.value_output()[1]
    return {
        "key": _compared(heads.key_HDK, query_HDK, heads.key_parts, rank),
        "value": _compared(heads.value_HDK, output_HDK, heads.value_parts, rank),
    }


def _compared(family_HDK, left_HDK, parts, rank):
    fits = {
        "svd": truncated_svd(family_HDK, rank),
        "mean_svd": mean_and_svd(family_HDK, rank),
        "alternating": alternating(family_HDK, rank),
    }
    if parts is not None:
        fits["learned"] = around(parts.shared_DK, family_HDK, rank)
    return {name: _figures(family_HDK, left_HDK, fit) for name, fit in fits.items()}


def _figures(family_HDK, left_HDK, fit):
    total_HDK, whole = fit.total_HDK, float(np.sum(family_HDK**2))
    return {
        "error": relative_error(family_HDK, total_HDK),
        "form_error": form_error(left_HDK, family_HDK, total_HDK),
        "shared_share": len(family_HDK) * float(np.sum(fit.shared_DK**2)) / whole,
        "residual_share": float(np.sum(fit.residual_HDK**2)) / whole,
        "shared_mean_cosine": _cosine(fit.shared_DK, family_HDK.mean(axis=0)),
    }


def _cosine(a, b):
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float(np.sum(a * b) / norms) if norms else None
