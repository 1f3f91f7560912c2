"""How different a layer's heads are: their bilinear forms compared, and the spectrum of that.

A head's form is A_h = L_h R_hᵀ, D × D: with (L, R) = (W^Q, W^K) what decides its logits, with
(W^V, W^Oᵀ) what it writes. A form does not change when (L, R) becomes (L G, R G⁻ᵀ), and neither
does anything here. No form is ever made: ⟨A_i, A_j⟩ = tr(A_iᵀ A_j) = Σ (L_iᵀ L_j) ∘ (R_iᵀ R_j).

H heads  D model width  W width of a head's factors
LRKV (https://arxiv.org/abs/2601.11471), appendix on head diversity; `docs/analysis.md`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from lrkv_jax.models.attention.head_weights import HeadWeights

FORMS = {"query_key": HeadWeights.query_key, "value_output": HeadWeights.value_output}

# Cosines are sums of D·W² products: exact to about 1e-14, and eigenvalues with them. What is below
# this share of the heads is rounding; two heads a millionth apart count as one.
ROUNDING = 1e-12


def gram(left_HDW: Float[np.ndarray, "H D W"], right_HDW: Float[np.ndarray, "H D W"]):
    """⟨A_i, A_j⟩ of every two forms A_h = L_h R_hᵀ: float64 [H, H].

    2 D (H W)² multiplications and additions; in addition to its arguments it holds a copy of
    both and two arrays of W × H W.
    """
    H, _, W = left_HDW.shape
    left_DV, right_DV = (
        np.concatenate(np.asarray(factor, np.float64), axis=1) for factor in (left_HDW, right_HDW)
    )
    gram_HH = np.empty((H, H))
    for i in range(H):
        own, rest = slice(i * W, (i + 1) * W), slice(i * W, None)  # j ≥ i; the others mirror it
        products = (left_DV[:, own].T @ left_DV[:, rest]) * (right_DV[:, own].T @ right_DV[:, rest])
        gram_HH[i, i:] = gram_HH[i:, i] = products.sum(axis=0).reshape(-1, W).sum(axis=1)
    return gram_HH


def normalized(gram_HH: Float[np.ndarray, "H H"]) -> Float[np.ndarray, "H H"]:
    """Cosines of forms, in [−1, 1]. A zero form is like nothing, itself included: its row is 0."""
    norms_H = np.sqrt(np.diag(gram_HH))
    inverse_H = np.divide(1.0, norms_H, out=np.zeros_like(norms_H), where=norms_H > 0)
    return gram_HH * inverse_H[:, None] * inverse_H


def centered(gram_HH: Float[np.ndarray, "H H"]) -> Float[np.ndarray, "H H"]:
    """The Gram matrix of the same vectors less their mean (kernel PCA: Schölkopf et al. 1998)."""
    rows_H = gram_HH.mean(axis=0)
    return gram_HH - rows_H - rows_H[:, None] + rows_H.mean()


def mean_off_diagonal(gram_HH: Float[np.ndarray, "H H"]) -> float | None:
    """Mean over pairs of different heads; None where there is one head."""
    H = len(gram_HH)
    return float((gram_HH.sum() - np.trace(gram_HH)) / (H * (H - 1))) if H > 1 else None


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a Gram matrix of H heads' cosines, largest first, and their summary.

    `cap` is the largest effective rank that there can be: H, or H − 1 once the mean is taken out,
    because H vectors that sum to zero span H − 1 dimensions.
    """

    values_H: Float[np.ndarray, "H"]
    cap: int

    @property
    def total(self) -> float:
        return float(self.values_H.sum())

    @property
    def shares_H(self) -> Float[np.ndarray, "H"]:
        """Shares of the total; all zero where the total is."""
        return self.values_H / self.total if self.total else self.values_H

    @property
    def effective_rank(self) -> float:
        """exp(−Σ p log p) of the shares p: n for n equal ones. 0 where there is nothing
        to share, as among identical heads less their mean."""
        shares = self.shares_H[self.shares_H > 0]
        return float(np.exp(-(shares * np.log(shares)).sum())) if len(shares) else 0.0

    @property
    def percent_of_heads(self) -> float:
        """The effective rank as the paper prints it."""
        return 100 * self.effective_rank / len(self.values_H)

    @property
    def percent_of_cap(self) -> float | None:
        """None where the cap is 0: one head, centered."""
        return 100 * self.effective_rank / self.cap if self.cap else None

    @property
    def cumulative_H(self) -> Float[np.ndarray, "H"]:
        """Share of the total in the first 1, 2, … H components."""
        return np.cumsum(self.shares_H)

    def components(self, share: float = 0.9) -> int:
        """The fewest components that hold `share` of the total; 0 where that is zero."""
        if not self.total:
            return 0
        return int(np.argmax(self.cumulative_H >= share - ROUNDING)) + 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "spectrum": self.values_H.tolist(),
            "cumulative": self.cumulative_H.tolist(),
            "effective_rank": self.effective_rank,
            "percent_of_heads": self.percent_of_heads,
            "percent_of_cap": self.percent_of_cap,
            "components_90": self.components(0.9),
            "cap": self.cap,
        }


def spectrum(gram_HH: Float[np.ndarray, "H H"], *, cap: int) -> Spectrum:
    """The eigenvalues of a normalized Gram matrix, or of a centered one.

    None is negative but by rounding: those within `ROUNDING` of zero, on either side, are set to
    it, so that what is not there adds no entropy.
    """
    values_H = np.linalg.eigvalsh(gram_HH)[::-1]
    return Spectrum(np.where(values_H > ROUNDING * len(gram_HH), values_H, 0.0), cap)


@dataclass(frozen=True)
class Diversity:
    """One layer's heads: cosines of their forms, and their spectra with and without the mean."""

    gram_HH: Float[np.ndarray, "H H"]
    uncentred: Spectrum
    centred: Spectrum

    @property
    def mean_off_diagonal(self) -> float | None:
        """The mean cosine of two different heads."""
        return mean_off_diagonal(self.gram_HH)

    def as_dict(self) -> dict[str, Any]:
        return {
            "gram": self.gram_HH.tolist(),
            "mean_off_diagonal": self.mean_off_diagonal,
            "uncentred": self.uncentred.as_dict(),
            "centred": self.centred.as_dict(),
        }


def diversity(
    left_HDW: Float[np.ndarray, "H D W"], right_HDW: Float[np.ndarray, "H D W"]
) -> Diversity:
    """Compare the forms A_h = L_h R_hᵀ of one layer's heads."""
    cosines_HH = normalized(gram(left_HDW, right_HDW))
    H = len(cosines_HH)
    return Diversity(
        cosines_HH, spectrum(cosines_HH, cap=H), spectrum(centered(cosines_HH), cap=H - 1)
    )


def null(layers: Iterable[HeadWeights], depth: int, inputs: int = 1) -> dict[str, Any]:
    """Mean and standard deviation of each number of `Diversity.as_dict` over random layers.

    Layers meet so many `inputs` in turn, as often each. A deviation is one over weights: that of
    layers with the same input, and the mean square of these.

    {"query_key": {"mean", "sd", "sd_of_mean", "draws"}, "value_output": the same}: `sd`
    is of one layer, `sd_of_mean` of the mean over a model's `depth` layers, which are
    independent at the start.
    """
    found: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
    for heads in layers:
        for form, factors in FORMS.items():
            found[form].append(diversity(*factors(heads)).as_dict())
    return {form: _spread(layers, depth, inputs) for form, layers in found.items()}


def _spread(layers: Sequence[dict[str, Any]], depth: int, inputs: int) -> dict[str, Any]:
    of_each = [deviation(layers[first::inputs]) for first in range(inputs)]
    sd = _leafwise(lambda sds: np.sqrt(np.mean(np.square(sds))), of_each)
    of_mean = jax.tree.map(lambda number: number * depth**-0.5, sd)
    return {"mean": mean(layers), "sd": sd, "sd_of_mean": of_mean, "draws": len(layers)}


def mean(dicts: Sequence[dict[str, Any]]) -> Any:
    """Mean of each number of nested dicts, lists left out; None where one of them is None."""
    return _leafwise(np.mean, dicts)


def deviation(dicts: Sequence[dict[str, Any]]) -> Any:
    """Standard deviation of each number, of a sample (n − 1); None for one."""
    return _leafwise(lambda values: np.std(values, ddof=1) if len(values) > 1 else None, dicts)


def _leafwise(reduce: Callable[[Any], Any], dicts: Sequence[dict[str, Any]]) -> Any:
    def one(*values):
        found = None if None in values else reduce(values)
        return None if found is None else float(found)

    return jax.tree.map(one, *map(_numbers, dicts), is_leaf=lambda leaf: leaf is None)


def _numbers(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _numbers(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if not isinstance(value, list)
    }
