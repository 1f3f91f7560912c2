"""How well a shared matrix and rank-R residuals fit a layer's heads: the best such fits in closed
form and by alternation, and the error that each would put into the logits. And how much of them a
shared matrix alone explains, before and after heads are aligned.

H heads  D model width  K head width  R rank  J rope pairs, K // 2
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from lrkv_jax.errors import LrkvError
from lrkv_jax.interop import fits
from lrkv_jax.models.attention.head_weights import HeadWeights, SharedResidual

ITERATIONS = 300
EXACT = 1e-15  # a relative error that is rounding


def truncated_svd(family_HDK: Float[np.ndarray, "H D K"], rank: int) -> SharedResidual:
    """Each W_h by itself at rank R, with nothing shared: optimal (Eckart & Young 1936)."""
    return around(np.zeros(family_HDK.shape[1:]), family_HDK, rank)


def mean_and_svd(family_HDK: Float[np.ndarray, "H D K"], rank: int) -> SharedResidual:
    """The heads' mean, and each deviation from it at rank R: not the optimum of this shape."""
    return around(family_HDK.mean(axis=0), family_HDK, rank)


def alternating(
    family_HDK: Float[np.ndarray, "H D K"], rank: int, *, iterations: int = ITERATIONS
) -> SharedResidual:
    """The least-squares fit of W_shared + U_h B_hᵀ to the heads: `fits.alternating`.

    Its error is at most `mean_and_svd`'s.
    """
    shared_DK = fits.alternating(family_HDK, rank, iterations=iterations)
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


def factorization(heads: HeadWeights, rank: int) -> dict[str, Any]:
    """{"key", "value"}: each of a layer's families against its approximations at rank R.

    `svd`, `mean_svd` and `alternating`. For each: the relative error, and the error of the forms
    (of the logits, for keys without MLA's rope part; of what heads write, for values).
    """
    return {
        "key": _errors(heads.key_HDK, heads.query_HDK, rank),
        "value": _errors(heads.value_HDK, heads.value_output()[1], rank),
    }


def _errors(
    family_HDK: Float[np.ndarray, "H D K"], left_HDK: Float[np.ndarray, "H D K"], rank: int
) -> dict[str, dict[str, float]]:
    fits = {"svd": truncated_svd, "mean_svd": mean_and_svd, "alternating": alternating}
    found = {}
    for name, fit in fits.items():
        total_HDK = fit(family_HDK, rank).total_HDK
        found[name] = {
            "error": relative_error(family_HDK, total_HDK),
            "form_error": form_error(left_HDK, family_HDK, total_HDK),
        }
    return found
