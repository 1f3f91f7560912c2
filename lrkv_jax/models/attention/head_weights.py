"""An attention layer's heads as matrices, whatever the variant stores: for analysis.

H heads  D model width  K head width  R residual rank  P rope-key width
"""

from dataclasses import dataclass

import numpy as np
from flax import nnx
from jaxtyping import Float


@dataclass(frozen=True)
class SharedResidual:
    """One family of head matrices, kept in factored form: W_h = W_shared + U_h B_hᵀ."""

    shared_DK: Float[np.ndarray, "D K"]
    down_HDR: Float[np.ndarray, "H D R"]
    up_HRK: Float[np.ndarray, "H R K"]

    @property
    def residual_HDK(self) -> Float[np.ndarray, "H D K"]:
        """U_h B_hᵀ."""
        return self.down_HDR @ self.up_HRK

    @property
    def total_HDK(self) -> Float[np.ndarray, "H D K"]:
        """W_shared + U_h B_hᵀ."""
        return self.shared_DK + self.residual_HDK


@dataclass(frozen=True)
class HeadWeights:
    """One layer's heads, each with separate matrices, in float64.

    Keys and values that heads share are repeated. `query_rope` and `rope_key` are MLA's part that
    carries positions; `key_parts` and `value_parts` are LRKV's, where its rank is not 0. `gain_K`
    is the product of the gains of queries and of keys, which are in no matrix here; nor are biases.
    """

    query_HDK: Float[np.ndarray, "H D K"]
    key_HDK: Float[np.ndarray, "H D K"]
    value_HDK: Float[np.ndarray, "H D K"]
    output_HKD: Float[np.ndarray, "H K D"]
    query_rope_HDP: Float[np.ndarray, "H D P"] | None = None
    rope_key_DP: Float[np.ndarray, "D P"] | None = None
    key_parts: SharedResidual | None = None
    value_parts: SharedResidual | None = None
    gain_K: Float[np.ndarray, "K"] | None = None

    def query_key(self) -> tuple[Float[np.ndarray, "H D W"], Float[np.ndarray, "H D W"]]:
        """(Q, K) with A_h = Q_h K_hᵀ: a logit between tokens at one position, without its norms.

        RoPE at offset zero is the identity, in every rope mode of LRKV too. MLA's is the sum of
        both its parts, W^Q_h (W_down W^up_h)ᵀ + W^Qr_h W_rᵀ, without the norms on its latent and
        its rope key; no variant's QK-norm is in it, nor LRKV's joint norm.
        """
        if self.gain_K is not None:
            return self.query_HDK * self.gain_K, self.key_HDK
        if self.rope_key_DP is None:
            return self.query_HDK, self.key_HDK
        rope_HDP = np.broadcast_to(self.rope_key_DP, self.query_rope_HDP.shape)
        return (
            np.concatenate([self.query_HDK, self.query_rope_HDP], axis=-1),
            np.concatenate([self.key_HDK, rope_HDP], axis=-1),
        )

    def value_output(self) -> tuple[Float[np.ndarray, "H D K"], Float[np.ndarray, "H D K"]]:
        """(V, Oᵀ) with W^V_h W^O_h = V_h O_h: what head h adds to the stream of an attended token.

        MLA's is without the norm on its latent.
        """
        return self.value_HDK, self.output_HKD.swapaxes(1, 2)


def in_float64(parameter: nnx.Param) -> np.ndarray:
    """A parameter as it is stored, in float64, on this host."""
    return np.asarray(parameter[...], np.float64)


def by_head(parameter: nnx.Param) -> Float[np.ndarray, "H D K"]:
    """A projection [D, H, K], in float64, its heads first."""
    return np.ascontiguousarray(in_float64(parameter).swapaxes(0, 1))
