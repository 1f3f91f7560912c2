"""A model's heads as matrices, their norms, and the overlap of LRKV's residuals and shared part.

H heads  D model width  K head width  R residual rank
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from scipy.linalg import orth, svdvals

from lrkv_jax.config import ModelConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.attention import abstract_layer
from lrkv_jax.models.attention.head_weights import HeadWeights, SharedResidual
from lrkv_jax.models.transformer import main_layers
from lrkv_jax.models.weights import draw, with_weights


def head_weights(config: ModelConfig, params: Any) -> Iterator[HeadWeights]:
    """Each layer's heads, first to last, of parameters as `load_run(run).params` gives them.

    With a `layers_pattern`, those of layers G, which have the variant that runs are compared by.
    One layer is in float64 at a time: at 4096 × 4096 its matrices are 0.5 GB. The
    matrices' input is the stream after its norm, and after that norm's gain where
    it has one. Raises `LrkvError` for weights that are not finite.
    """
    abstract, cycle = abstract_layer(config), len(config.cycle)
    for layer in main_layers(config):
        blocks = params["blocks"]
        if config.layers_pattern is not None:
            blocks = blocks[f"layer_{layer % cycle}"]
        weights = {
            name: np.asarray(leaf[layer // cycle]) for name, leaf in blocks["attention"].items()
        }
        for name, leaf in weights.items():
            if not np.isfinite(leaf).all():
                raise LrkvError(f"blocks.attention.{name} is not finite: analyze an earlier step")
        yield with_weights(abstract, weights).head_weights()


def random_heads(config: ModelConfig, seeds: int) -> Iterator[HeadWeights]:
    """A freshly initialized layer, for each of `seeds` seeds.

    Its output projection, which starts at zero and so has no direction, is drawn from a Gaussian:
    no statistic of forms depends on its scale. LRKV's residuals are a tenth of its shared part
    there, so that its null is nearly MQA's. Raises `LrkvError` for no seeds.
    """
    if seeds < 1:
        raise LrkvError(f"null_seeds = {seeds}: use 1 or more")
    for seed in range(seeds):
        layer = config.attention.layer_class()(config.main_kind)
        draw(layer, jax.random.key(seed))
        heads = layer.head_weights()
        output_HKD = np.random.default_rng(seed).standard_normal(heads.output_HKD.shape)
        yield replace(heads, output_HKD=output_HKD)


def magnitude(heads: HeadWeights) -> dict[str, dict[str, float | None]]:
    """{"key", "value"}: ‖W_h‖ ("total"), ‖W_shared‖ and ‖U_h B_hᵀ‖ ("residual"), mean over heads.

    Shared and residual are None where the variant has no such parts. ‖W_h‖² is not the
    sum of their squares unless they are orthogonal (`geometry`). QK-norm hides the norm
    of a key from its logits; nothing hides a value's.
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


def geometry(heads: HeadWeights) -> dict[str, Any] | None:
    """{"key", "value"} of a layer with parts; None for variants that have none.

    `cosine` is each head's; a random residual's has mean 0 and standard deviation 1/√(D K),
    `cosine_null_sd`. `mean_square` is that of the principal cosines between the columns of
    W_shared, K dimensions of D, and those of U_h; for a random U_h it is K / D, `mean_square_null`.
    All are the same for U G, B G⁻ᵀ. Row spaces are not compared: W_shared's is all K dimensions.
    """
    if heads.key_parts is None:
        return None
    return {"key": _geometry(heads.key_parts), "value": _geometry(heads.value_parts)}


def _geometry(parts: SharedResidual) -> dict[str, Any]:
    D, K = parts.shared_DK.shape
    cosines_H = cosines(parts)
    principal = [principal_cosines(parts.shared_DK, down_DR) for down_DR in parts.down_HDR]
    return {
        "cosine": cosines_H.tolist(),
        "mean_cosine": float(cosines_H.mean()),
        "cosine_null_sd": (D * K) ** -0.5,
        "mean_square": float(np.mean(np.concatenate(principal) ** 2)),
        "mean_square_null": min(K / D, 1.0),
    }
