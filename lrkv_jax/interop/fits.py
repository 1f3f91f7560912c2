"""Keys and values of pretrained heads as what a smaller cache can hold: the closed-form fits.

A fit is good where it is read. The input of a layer has the second moments C = E[x xᵀ],
and what reads group g's keys or values has a metric N_g², so that

    Σ_g ‖C^½ (W_g − Ŵ_g) N_g‖²

is, over independent tokens, the mean square error of what heads write (values, N_g² =
Σ_h W^O_h W^O_hᵀ over the group's heads) or of logits (keys). Averaged over relative positions,
rotated queries have no correlations between frequencies, so a key's N_g is a number n_gj for each
pair j: n_gj² = ½ Σ_h E|q_hj|².

Heads are free in what their outputs do not depend on, the *gauge*. Values may be
multiplied by any K × K matrix per group that the output projection undoes; keys by what
commutes with RoPE, a complex number per pair, which queries undo, and under QK-norm by
a phase. Raw heads share little; heads in the right gauge share more.

All of it in float64, in the coordinates Y_g = C^½ W_g N_g, cut by one QR to as many
rows as all groups have columns.

D model width  H heads  G key/value heads  K head width  J = K / 2 rope pairs
R rank of a residual  C latent width  M ≤ D reduced rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Complex, Float

from lrkv_jax.config import ModelConfig

ITERATIONS = 100
STEADY = 1e-5  # the relative fall of the error in one iteration below which an alternation ends
EXACT = 1e-15  # a relative error that is rounding
FREE = 1e-10  # eigenvalues, of 1, below which a direction of the shared matrix is free
# Second moments are estimated from some thousands of tokens: directions that those
# hardly have are raised to this share of the mean.
FLOOR = 1e-4
# A gauge that is nearly singular would make its inverse large. Its singular values are
# raised to this share of the largest, and the residual holds the difference.
CONDITION = 1e-3


@dataclass(frozen=True)
class Calibration:
    """What text shows of one layer: `moment_DD` = E[x xᵀ] of what its projections read, and
    `energy_HJ` = E|q_hj|² of each head's queries in products with keys, by pair of coordinates.

    `gain_K` is the gain of keys after their norm, where the model has one.
    """

    moment_DD: Float[np.ndarray, "D D"]
    energy_HJ: Float[np.ndarray, "H J"]
    gain_K: Float[np.ndarray, "K"] | None = None

    def of_keys(self, groups: int) -> Float[np.ndarray, "G K"]:
        """n_g of each coordinate of a key: both of a pair have the pair's, except for the gain."""
        H, J = self.energy_HJ.shape
        squares_GJ = self.energy_HJ.reshape(groups, H // groups, J).sum(axis=1) / 2
        gain_K = np.ones(2 * J) if self.gain_K is None else self.gain_K
        squares_GK = np.tile(squares_GJ, 2) * gain_K**2
        return np.sqrt(np.maximum(squares_GK, FLOOR * squares_GK.mean()))


def reader_of_values(
    output_HKD: Float[np.ndarray, "H K D"], groups: int
) -> Float[np.ndarray, "G K K"]:
    """N_g of values: the root of Σ_h W^O_h W^O_hᵀ over each group's heads."""
    H, K, _ = output_HKD.shape
    squares_HKK = output_HKD @ output_HKD.swapaxes(1, 2)
    squares_GKK = squares_HKK.reshape(groups, H // groups, K, K).sum(axis=1)
    return np.stack([root(square, FREE) for square in squares_GKK])


def freedom(model: ModelConfig) -> str:
    """The transformations of keys that outputs do not depend on, as in `shared_keys`."""
    return "nothing" if model.qk_gain else "phase" if model.qk_norm else "any"


def root(
    moment_DD: Float[np.ndarray, "D D"], floor: float = 0.0, power: float = 0.5
) -> Float[np.ndarray, "D D"]:
    """The symmetric power of a second moment, ½ or −½, its eigenvalues raised to `floor` means."""
    values_D, vectors_DD = np.linalg.eigh(moment_DD)
    values_D = np.maximum(values_D, floor * values_D.mean())
    return (vectors_DD * np.maximum(values_D, 0.0) ** power) @ vectors_DD.T


@dataclass(frozen=True)
class Reduced:
    """Weights W_g [D, K] in the coordinates of C^½, Q C^½-orthonormal: Y_g = Qᵀ C^½ W_g.

    `back_DM` takes an input factor from them to the layer's: C^−½ Q.
    """

    back_DM: Float[np.ndarray, "D M"]
    parts: tuple[Float[np.ndarray, "G M K"], ...]

    @classmethod
    def of(cls, moment_DD, *families: Float[np.ndarray, "G D K"]) -> Reduced:
        """Families of weights that read one input, each as Y_g without its reader."""
        root_DD = root(moment_DD, FLOOR)
        read = [root_DD @ family_GDK for family_GDK in families]
        Q_DM, _ = np.linalg.qr(np.concatenate([_side_by_side(one) for one in read], axis=1))
        return cls(root(moment_DD, FLOOR, -0.5) @ Q_DM, tuple(Q_DM.T @ one for one in read))


@dataclass(frozen=True)
class Joint:
    """One latent for all groups, and a private one for each group: W_g ≈ down A_g + own_g B_g.

    `up` and `own_up` hold those factors for each family that was fitted, keys and values.
    """

    down_DC: Float[np.ndarray, "D C"]
    up: tuple[Float[np.ndarray, "G C K"], ...]
    own_GDR: Float[np.ndarray, "G D R"]
    own_up: tuple[Float[np.ndarray, "G R K"], ...]

    @property
    def total(self) -> tuple[Float[np.ndarray, "G D K"], ...]:
        """Each family's Ŵ_g."""
        return tuple(
            self.down_DC @ up + self.own_GDR @ own
            for up, own in zip(self.up, self.own_up, strict=True)
        )


def joint(
    reduced: Reduced,
    readers: Sequence[Float[np.ndarray, "G K K"]],
    width: int,
    rank: int,
    *,
    weights: Sequence[float],
) -> Joint:
    """Families that read one latent of `width`, and one of `rank` in each group.

    Each family's error counts relative to the family, times its square of `weights`. Without a
    rank it is the optimum (Eckart & Young 1936); with one, both parts are fitted alternately, each
    exactly, and the error never rises.
    """
    read = [part @ N for part, N in zip(reduced.parts, readers, strict=True)]
    scaled = [w * y / np.linalg.norm(y) for w, y in zip(weights, read, strict=True)]
    Y_GMN = np.concatenate(scaled, axis=2)
    S_MC, own_GMR = _span_and_own(Y_GMN, width, rank)
    up = tuple(S_MC.T @ part for part in reduced.parts)
    # Where the latent leaves fewer than R directions, the others of `own` lie in its span.
    left = (part - S_MC @ of_all for part, of_all in zip(reduced.parts, up, strict=True))
    own_up = tuple(own_GMR.swapaxes(1, 2) @ part for part in left)
    return Joint(reduced.back_DM @ S_MC, up, reduced.back_DM @ own_GMR, own_up)


@dataclass(frozen=True)
class SharedFit:
    """A shared matrix and residuals, in a gauge: W_g ≈ (shared + down_g up_g) gauge_g.

    `condition` is the largest of the gauges' condition numbers. The model keeps shared, down and
    up; what reads group g is multiplied by gauge_g: W^O_h by it, W^Q_h by its transpose.
    """

    shared_DK: Float[np.ndarray, "D K"]
    down_GDR: Float[np.ndarray, "G D R"]
    up_GRK: Float[np.ndarray, "G R K"]
    gauge_GKK: Float[np.ndarray, "G K K"]

    @property
    def total_GDK(self) -> Float[np.ndarray, "G D K"]:
        """Ŵ_g."""
        return (self.shared_DK + self.down_GDR @ self.up_GRK) @ self.gauge_GKK

    @property
    def condition(self) -> float:
        return float(np.linalg.cond(self.gauge_GKK).max())


def shared_values(
    reduced_GMK: Float[np.ndarray, "G M K"],
    back_DM: Float[np.ndarray, "D M"],
    reader_GKK: Float[np.ndarray, "G K K"],
    rank: int,
) -> SharedFit:
    """Values: a shared matrix in any basis of each group, and residuals of a rank.

    The shared span and the residuals outside it are fitted alternately, each exactly.
    """
    K = reduced_GMK.shape[2]
    Y_GMK = reduced_GMK @ reader_GKK
    S_MK, _ = _span_and_own(Y_GMK, K, rank)
    gauge_GKK = np.stack([_conditioned(one) for one in S_MK.T @ Y_GMK])
    fit = _with_residual(S_MK, gauge_GKK, Y_GMK, back_DM, rank)
    return replace(fit, gauge_GKK=gauge_GKK @ np.linalg.inv(reader_GKK))


def shared_keys(
    reduced_GMK: Float[np.ndarray, "G M K"],
    back_DM: Float[np.ndarray, "D M"],
    reader_GK: Float[np.ndarray, "G K"],
    rank: int,
    *,
    free: str,
) -> SharedFit:
    """Keys: a shared matrix whose pairs each group turns and scales, and residuals of a rank.

    `free` is what the model's outputs do not depend on: "any" complex number per pair,
    a "phase", or "nothing" (a gain after the norm fixes coordinates). Pairs' numbers
    and residuals are fitted alternately, each exactly.
    """
    if free == "nothing":
        return _untouched_keys(reduced_GMK, back_DM, reader_GK, rank)
    G, M, K = reduced_GMK.shape
    J = K // 2
    n_GJ = reader_GK[:, :J]
    Y_GMK = reduced_GMK * reader_GK[:, None]
    residual_GMK = np.zeros_like(Y_GMK)
    turn_GJ = np.ones((G, J), complex)
    before = np.inf
    for _ in range(ITERATIONS):
        rest_GMJ = _complex(Y_GMK - residual_GMK)
        shared_MJ, turn_GJ = _one_for_all(rest_GMJ, n_GJ, turn_GJ, free)
        left_GMK = Y_GMK - _real(shared_MJ * turn_GJ[:, None])
        basis_GMR = leading(left_GMK, rank)
        residual_GMK = basis_GMR @ (basis_GMR.swapaxes(1, 2) @ left_GMK)
        error = np.sum((left_GMK - residual_GMK) ** 2)
        if error > before * (1 - STEADY):
            break
        before = error
    if free == "any":  # a pair that a group hardly has
        least_G1 = CONDITION * np.abs(turn_GJ).max(axis=1, keepdims=True)
        size_GJ = np.abs(turn_GJ)
        turn_GJ = np.maximum(size_GJ, least_G1) * np.exp(1j * np.angle(turn_GJ))
    turning_GKK = _as_matrices(turn_GJ)
    fit = _with_residual(_real(shared_MJ), turning_GKK, Y_GMK, back_DM, rank)
    return replace(fit, gauge_GKK=turning_GKK / reader_GK[:, None])


def _untouched_keys(reduced_GMK, back_DM, reader_GK, rank):
    """`SharedFit` in the coordinates that the keys have."""
    S_MK = alternating(reduced_GMK, rank, reader_GK)
    readers_GKK = reader_GK[:, :, None] * np.eye(reduced_GMK.shape[2])
    fit = _with_residual(S_MK, readers_GKK, reduced_GMK * reader_GK[:, None], back_DM, rank)
    return replace(fit, gauge_GKK=np.stack([np.eye(reduced_GMK.shape[2])] * len(reduced_GMK)))


def alternating(
    family_GMK: Float[np.ndarray, "G M K"],
    rank: int,
    reader_GK: Float[np.ndarray, "G K"] | None = None,
    *,
    iterations: int = ITERATIONS,
) -> Float[np.ndarray, "M K"]:
    """S of the least-squares fit of S + U_g B_gᵀ to the groups where they are read, in no gauge.

    With N_g = diag(reader_g), 1 unless given, and orthonormal rows B_gᵀ N_g the best U_g leaves
    Σ ‖(W_g − S) N_g (1 − P_g)‖², P_g the projection to those rows. Each of two steps minimizes that
    exactly: P_g from the SVD of (W_g − S) N_g, and S from a linear equation, which moves U_g along.
    (The usual second step, the mean of W_g − U_g B_gᵀ at fixed residuals, needs three times the
    iterations.) It begins at the groups' mean, and the error never rises. It ends at a stationary
    point, which nothing proves to be the best. Families of this shape are found to rounding in 16
    to 80 iterations where R ≤ K / 2 and G ≥ 4; for three groups at R = K / 2 the last percent takes
    thousands.
    """
    G, _, K = family_GMK.shape
    N_GK = np.ones((G, K)) if reader_GK is None else reader_GK
    all_K = np.sum(N_GK**2, axis=0)
    S_MK = np.sum(family_GMK * N_GK[:, None] ** 2, axis=0) / all_K
    exact, before = EXACT**2 * float(np.sum((family_GMK * N_GK[:, None]) ** 2)), np.inf
    for _ in range(iterations):
        left_GMK = (family_GMK - S_MK) * N_GK[:, None]
        rows_GKR = leading(left_GMK.swapaxes(1, 2), rank)
        rest_GKK = np.eye(K) - rows_GKR @ rows_GKR.swapaxes(1, 2)
        left_GMK = left_GMK @ rest_GKK
        error = float(np.sum(left_GMK**2))
        if error <= exact or error > before * (1 - STEADY) ** 2:
            break
        before = error
        met_KK = np.einsum("GK,GKL,GL->KL", N_GK, rest_GKK, N_GK)
        values_K, vectors_KK = np.linalg.eigh(met_KK)
        # A direction that is in every residual leaves S free: it stays as it is there.
        there_K = values_K > FREE * all_K.max()
        inverse_K = np.divide(1.0, values_K, out=np.zeros(K), where=there_K)
        toward_MK = np.sum(left_GMK * N_GK[:, None], axis=0)
        S_MK = S_MK + toward_MK @ (vectors_KK * inverse_K) @ vectors_KK.T
    return S_MK


def relative_error(family_GDK, fitted_GDK, moment_DD, reader_GKK) -> float:
    """Σ ‖C^½ (W − Ŵ) N‖² / Σ ‖C^½ W N‖²: the square error where it is read, of 1."""
    root_DD = root(moment_DD, FLOOR)

    def size(weights_GDK):
        return float(np.sum((root_DD @ weights_GDK @ reader_GKK) ** 2))

    return size(family_GDK - fitted_GDK) / size(family_GDK)


def leading(matrix_MN: Float[np.ndarray, "... M N"], rank: int) -> Float[np.ndarray, "... M R"]:
    """The left singular vectors of the `rank` largest singular values.

    By eigenvectors of the smaller of the two products: vectors whose singular values
    are below 1e-8 of the largest are in no order, and are orthonormal all the same.
    """
    M, N = matrix_MN.shape[-2:]
    turned_NM = matrix_MN.swapaxes(-1, -2)
    if M <= N:
        return np.linalg.eigh(matrix_MN @ turned_NM)[1][..., M - rank :]
    right_NR = np.linalg.eigh(turned_NM @ matrix_MN)[1][..., N - rank :]
    return np.linalg.qr(matrix_MN @ right_NR[..., ::-1])[0]


def _span_and_own(Y_GMN, width, rank):
    """Orthonormal [M, C] for all groups and [G, M, R] of each, orthogonal to it: the best in turn.

    What the first leaves is cut to the second's rank, and the first is fitted to what
    the second leaves.
    """
    own_GMR, before = np.zeros((*Y_GMN.shape[:2], rank)), np.inf
    best = S_MC = None
    for _ in range(ITERATIONS):
        rest_GMN = Y_GMN - own_GMR @ (own_GMR.swapaxes(1, 2) @ Y_GMN)
        read_MX = _side_by_side(rest_GMN)
        if S_MC is None:
            S_MC = leading(read_MX, width)
        else:  # a step of orthogonal iteration from the last one: it never loses either
            S_MC = np.linalg.qr(read_MX @ (read_MX.T @ S_MC))[0]
        outside_GMN = Y_GMN - S_MC @ (S_MC.T @ Y_GMN)
        own_GMR = leading(outside_GMN, rank)
        error = np.sum((outside_GMN - own_GMR @ (own_GMR.swapaxes(1, 2) @ outside_GMN)) ** 2)
        if error < before:  # always, except for rounding
            best = S_MC, own_GMR
        if not rank or error > before * (1 - STEADY):
            break
        before = error
    return best


def _one_for_all(rest_GMJ, n_GJ, turn_GJ, free):
    """The complex vector of each pair, and each group's number, that fit best.

    With any number it is the leading singular pair. With phases alone the vector is the
    weighted mean of the groups' vectors, turned back, and the phases are renewed once.
    """
    if free == "any":
        u_JMX, s_JX, vh_JXG = np.linalg.svd(rest_GMJ.transpose(2, 1, 0), full_matrices=False)
        return u_JMX[:, :, 0].T, (s_JX[:, :1] * vh_JXG[:, 0]).T
    unread_GMJ = rest_GMJ / n_GJ[:, None]  # as W has it
    squares_GJ = n_GJ**2

    def mean(phase_GJ):
        turned = np.einsum("GMJ,GJ->MJ", unread_GMJ, squares_GJ * phase_GJ.conj())
        return turned / squares_GJ.sum(axis=0)

    shared_MJ = mean(turn_GJ / np.abs(turn_GJ))
    toward_GJ = np.einsum("MJ,GMJ->GJ", shared_MJ.conj(), unread_GMJ)
    phase_GJ = np.exp(1j * np.angle(toward_GJ))
    return mean(phase_GJ), n_GJ * phase_GJ


def _with_residual(S_MK, gauge_GKK, Y_GMK, back_DM, rank):
    """Residuals of what a shared part in its gauges leaves, with the gauge taken out of them."""
    left_GMK = Y_GMK - S_MK @ gauge_GKK
    basis_GMR = leading(left_GMK, rank)
    up_GRK = basis_GMR.swapaxes(1, 2) @ left_GMK @ np.linalg.inv(gauge_GKK)
    return SharedFit(back_DM @ S_MK, back_DM @ basis_GMR, up_GRK, gauge_GKK)


def _conditioned(gauge_KK):
    left, values_K, right = np.linalg.svd(gauge_KK)
    return (left * np.maximum(values_K, CONDITION * values_K[0])) @ right


def _complex(matrix_GMK) -> Complex[np.ndarray, "G M J"]:
    J = matrix_GMK.shape[-1] // 2
    return matrix_GMK[..., :J] + 1j * matrix_GMK[..., J:]


def _real(matrix):
    return np.concatenate([matrix.real, matrix.imag], axis=-1)


def _as_matrices(turn_GJ) -> Float[np.ndarray, "G K K"]:
    """The K × K matrices that multiply rows' pairs by these numbers."""
    G, J = turn_GJ.shape
    matrices = np.zeros((G, 2 * J, 2 * J))
    j = np.arange(J)
    matrices[:, j, j] = matrices[:, J + j, J + j] = turn_GJ.real
    matrices[:, j, J + j], matrices[:, J + j, j] = turn_GJ.imag, -turn_GJ.imag
    return matrices


def _side_by_side(family_GMN):
    return family_GMN.transpose(1, 0, 2).reshape(family_GMN.shape[1], -1)
