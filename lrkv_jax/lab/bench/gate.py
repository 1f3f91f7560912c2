"""Correctness before speed: an implementation that differs from the truth is not timed.

The truth attends, in float64, to the keys and values of each head that the layer says its cache
stands for; no decode kernel is part of it. The compiled program that will be timed is the one that
is checked, at its full shape. The truth holds every key of every head, so it is computed for the
shortest and the longest sequence alone, and, where even one would not fit, over the first slots
only: lengths are arguments, so the program is checked there too.

S cache slots  H heads  G key/value heads  W key width  K value width
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax.lab.bench.problems import DecodeInputs, DecodeProblem, materialised
from lrkv_jax.models.attention.cache import slot_axes

# Float32 values of one sequence's keys, over all heads, that the truth may build.
TRUTH_VALUES = 1 << 28

# Largest difference over the largest output. bfloat16: queries, weights and factors are rounded to
# 2⁻⁹ each. float32 on a GPU: XLA multiplies in TF32, 2⁻¹¹.
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
TOLERANCE_TF32 = 5e-3


@dataclass(frozen=True)
class Truth:
    """The answer for some rows of a problem, at the lengths that were checked."""

    rows: list[int]
    lengths_B: np.ndarray
    out: np.ndarray
    lse: np.ndarray

    @property
    def says(self) -> str:
        """What was checked, for the report."""
        return f"sequences of {' and '.join(str(self.lengths_B[row]) for row in self.rows)} tokens"


def tolerance(dtype: str) -> float:
    """The allowed difference, relative to the largest output."""
    tf32 = dtype == "float32" and jax.default_backend() != "cpu"
    return TOLERANCE_TF32 if tf32 else TOLERANCE[dtype]


def truth_of(problem: DecodeProblem) -> Truth:
    """The answers for the shortest and the longest sequence of a problem."""
    lengths_B = np.asarray(problem.lengths_B)
    model = problem.model
    slots = min(int(lengths_B.max()), max(1, TRUTH_VALUES // (model.heads * model.head_width)))
    rows = sorted({int(lengths_B.argmin()), len(lengths_B) - 1 - int(lengths_B[::-1].argmax())})
    checked_B = np.minimum(lengths_B, slots)

    @jax.jit
    def whole(inputs, cache, lengths_B, row):
        one = jax.tree.map(lambda a: a.astype(jnp.float32), _row(inputs, cache, row, slots))
        length_B = jax.lax.dynamic_slice_in_dim(lengths_B, row, 1)
        with jax.default_matmul_precision("highest"):
            return materialised(problem, *one, length_B)

    arrays = (problem.inputs, problem.cache, jnp.asarray(checked_B))
    scale = problem.abstract.scale
    answers = [
        attend(*whole(*arrays, row), int(checked_B[row]), scale)  # type: ignore[call-arg] # of three
        for row in rows
    ]
    out, lse = (np.stack([answer[i] for answer in answers]) for i in (0, 1))
    return Truth(rows, checked_B, out, lse)


def attend(q_1THW, k_1SGW, v_1SGK, length: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """One sequence's last query in float64: outputs [1, H, K] and log-sum-exp [1, H]."""
    q_HW, k_SGW, v_SGK = np.asarray(q_1THW)[0, -1], np.asarray(k_1SGW)[0], np.asarray(v_1SGK)[0]
    H, G = len(q_HW), k_SGW.shape[1]
    out, lse = [], []
    for head in range(H):  # one head's keys at a time: float64 takes twice the room
        g = head // (H // G)
        k_sW, v_sK = (a[:length, g].astype(np.float64) for a in (k_SGW, v_SGK))
        logits_s = scale * (k_sW @ q_HW[head].astype(np.float64))
        peak = logits_s.max()
        weights_s = np.exp(logits_s - peak)
        out.append(weights_s @ v_sK / weights_s.sum())
        lse.append(peak + np.log(weights_s.sum()))
    return np.stack(out)[None], np.array(lse)[None]


def _row(inputs: DecodeInputs, cache, row, slots: int) -> tuple:
    """What one sequence is given, and the first slots of its cache."""
    axes = slot_axes(cache)

    def cut(name):
        def of(leaf):
            one = jax.lax.dynamic_slice_in_dim(leaf, row, 1)
            return jax.lax.slice_in_dim(one, 0, slots, axis=axes[name])

        return jax.tree.map(of, getattr(cache, name))

    query = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, row, 1), inputs.query)
    return inputs._replace(query=query), type(cache)(**{name: cut(name) for name in axes})


def error(truth: Truth, out, lse) -> float:
    """Largest difference from the truth over its largest output; NaN counts as infinite.

    The log-sum-exp, where there is one, is of order 1 to 10 and compared as it is.
    """
    got = np.asarray(out, np.float32)[truth.rows]
    worst = np.abs(got - truth.out).max() / np.abs(truth.out).max()
    if lse is not None:
        worst = max(worst, np.abs(np.asarray(lse, np.float32)[truth.rows] - truth.lse).max())
    return float(worst) if np.isfinite(worst) else float("inf")
