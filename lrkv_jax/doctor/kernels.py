"""Each kernel against its oracle, at the shapes of every variant.

Decoding is held against keys and values of each head in float64 (`bench.gate`), attention over
whole sequences and its gradients against the definition in float32 on the CPU
(`kernels.reference`), and the loss against `log_softmax`.

B batch  T positions  S cache slots  G key/value heads  W key width  K value width
D model width  V vocabulary
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax.bench import gate
from lrkv_jax.bench.implementations import IMPLEMENTATIONS
from lrkv_jax.bench.lines import lines_of
from lrkv_jax.bench.problems import Problem, lengths_of, make_problem, materialised
from lrkv_jax.doctor.finding import FAST_COMPILE, WRONG, Finding, at, judged
from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels import flash, proof, reference
from lrkv_jax.kernels.cross_entropy import mean_cross_entropy
from lrkv_jax.nn.dtype import resolve_dtype

SCALE = "128m"  # its heads are as wide as those that the GPU's kernels are written for
SEQUENCES, TOKENS = 2, 160
VOCABULARY, WIDTH, CHUNK = 515, 96, 64


def of_line(variant: str, rope: str | None) -> Finding:
    """Every kernel that a variant may decode or train with, in one of its modes."""
    dtype = resolve_dtype("auto").name
    (line,) = lines_of(SCALE, [variant], rope and [rope], depth=1)
    lengths_B = lengths_of(SEQUENCES, TOKENS, ragged=True, seed=0)
    problem = make_problem(line.computing_in(dtype).config.model, lengths_B, TOKENS, dtype, seed=0)
    errors = decoding(problem) | attention(problem, dtype)
    return check_errors(f"kernels, {line.name}", errors, gate.tolerance(dtype))


def check_errors(name: str, errors: dict[str, float], allowed: float) -> Finding:
    """Largest differences over the largest value, by kernel."""
    faults = {
        f"{kernel} differs from its oracle by {error:.0e}, {allowed:.0e} allowed": WRONG
        for kernel, error in errors.items()
        if error > allowed
    }
    says = ", ".join(f"{kernel} {error:.0e}" for kernel, error in errors.items())
    return judged(name, faults, says, {"errors": errors, "allowed": allowed})


def decoding(problem: Problem) -> dict[str, float]:
    """The errors of the layer's decode kernels."""
    at("the oracle of decoding")
    truth, errors = gate.truth_of(problem), {}
    for name in ("xla", "mosaic"):
        at(f"decode {name}")
        program = jax.jit(partial(IMPLEMENTATIONS[name].attend, problem))
        try:
            with proof.unneeded():
                answer = program(problem.given, problem.cache, jnp.asarray(truth.lengths_B))
        except LrkvError:  # the kernel is not for this machine or these shapes
            continue
        errors[f"decode {name}"] = gate.error(truth, *answer)
    return errors


def attention(problem: Problem, dtype: str) -> dict[str, float]:
    """The errors of attention over whole sequences, the largest of output and gradients."""
    given = problem.given, problem.cache, problem.lengths_B
    q_B1HW, k_BTGW, v_BTGK = cast(Any, jax.eval_shape(partial(materialised, problem), *given))
    (B, _, H, W), K = q_B1HW.shape, v_BTGK.shape[-1]
    rng, scale = np.random.default_rng(0), problem.abstract.scale
    sizes = (B, TOKENS, H, W), k_BTGW.shape, v_BTGK.shape, (B, TOKENS, H, K)
    arrays = [jnp.asarray(rng.standard_normal(size), dtype) for size in sizes]
    at("the oracle of attention")
    with jax.default_device(jax.devices("cpu")[0]):
        exact = [np.asarray(array, np.float32) for array in arrays]
        truth = _with_gradients("oracle", scale, "cpu")(*exact)
    errors = {}
    for name in flash.IMPLEMENTATIONS[1:]:
        if name == "cudnn" and flash.cudnn.objection(*arrays[:3]):
            continue
        at(f"attention {name}")
        answer = _with_gradients(name, scale, jax.default_backend())(*arrays)
        errors[f"attention {name}"] = _worst(answer, truth)
    return errors


@functools.cache  # some variants have the same shapes
def _with_gradients(name: str, scale: float, backend: str) -> Callable:
    """(q, k, v, weight) → the output, and the gradients of its sum with these weights."""

    def attend(q, k, v):
        if name != "oracle":
            return flash.causal_attention(q, k, v, scale=scale, impl=name)
        return reference.grouped_decode(q, k, v, jnp.full(len(q), TOKENS), scale=scale)[0]

    def answer(q, k, v, weight):
        out, back = jax.vjp(attend, q, k, v)
        return out, *back(weight.astype(out.dtype))

    return jax.jit(answer, compiler_options=FAST_COMPILE if backend == "cpu" else None)


def loss() -> Finding:
    """The chunked cross-entropy with its gradients."""
    rng, dtype = np.random.default_rng(0), resolve_dtype("auto")
    x_BTD = rng.standard_normal((SEQUENCES, TOKENS, WIDTH)).astype(dtype)
    kernel_DV = (rng.standard_normal((WIDTH, VOCABULARY)) / WIDTH**0.5).astype(dtype)
    targets_BT = rng.integers(0, VOCABULARY, (SEQUENCES, TOKENS))

    def oracle(x_BTD, kernel_DV):
        nll_BTV = -jax.nn.log_softmax(jnp.matmul(x_BTD, kernel_DV, precision="highest"))
        return jnp.take_along_axis(nll_BTV, targets_BT[..., None], -1).mean()

    def ours(x_BTD, kernel_DV):
        return mean_cross_entropy(x_BTD, kernel_DV, targets_BT, softcap=None, chunk=CHUNK)[0]

    def answer(function, dtype):
        program = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))
        value, gradients = program(x_BTD.astype(dtype), kernel_DV.astype(dtype))
        return value, *gradients

    with jax.default_device(jax.devices("cpu")[0]):
        truth = answer(oracle, np.float32)
    at("cross-entropy")
    errors = {"cross-entropy": _worst(answer(ours, dtype), truth)}
    return check_errors("kernels, loss", errors, gate.tolerance(dtype.name))


def _worst(answer: Sequence[Any], truth: Sequence[Any]) -> float:
    """Largest difference of any array over its oracle's largest value; infinite for a NaN."""
    worst = 0.0
    for ours, exact in zip(answer, truth, strict=True):
        a, b = np.asarray(ours, np.float64), np.asarray(exact, np.float64)
        error = float(np.abs(a - b).max() / np.abs(b).max())
        worst = max(worst, error if np.isfinite(error) else np.inf)
    return worst
