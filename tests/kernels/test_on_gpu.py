"""On a GPU: each compiled kernel at every scale, in bfloat16, against float32 oracles.

`pytest -m gpu tests/kernels`. A decode kernel meets the problem of its check before first use
(`lrkv_jax.kernels.gpu.kernel_check`): ragged lengths, one of them 0, NaN past each, rings that are
used again. The oracles are the definitions (`support.reference`). On a CPU the same checks run
interpreted, at tiny shapes.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from support import reference, targets

from lrkv_jax.config import load_config
from lrkv_jax.kernels import flash, online
from lrkv_jax.kernels.gpu import kernel_check
from lrkv_jax.kernels.gpu import plan as plans

# The paper's 36 x 2304, 128M, 24 x 1536 and 6.3B.
SCALES = ("2.5b", "128m", "1.2b", "6.3b")
CASES = [
    *((scale, v, T, "contiguous") for scale in SCALES for v in targets.VARIANTS for T in (1, 8)),
    *(("2.5b", variant, 1, "paged") for variant in targets.VARIANTS),
]
# Of the largest gradient; bfloat16 rounds to 2⁻⁹, and a gradient is a sum of many products.
GRADIENT_TOLERANCE = 2e-2


def call_of(*case):
    """The check's call of a case of `targets`, at the layers' scale.

    At the check's own, logits of rounded arrays of unit variance would differ by much.
    """
    found = targets.call_of(*case)
    return replace(found, scale=sum(found.plan.key_widths) ** -0.5)


def difference(found, *, interpret):
    """How far the kernel is from the oracle, as `kernel_check.TOLERANCE` counts it."""
    arrays, lengths_B = jax.jit(partial(kernel_check.problem, found))(0)
    whole = jax.tree.map(partial(contiguous, arrays[-1]), found.axes[:-1], arrays[:-1])
    oracle = getattr(reference, found.mosaic.__module__.rpartition(".")[2])
    wanted = jax.jit(partial(oracle, scale=found.scale))(*whole, lengths_B)
    got = jax.jit(
        lambda arrays, n_B: found.mosaic(found.plan, *arrays, n_B, found.scale, interpret)
    )(arrays, lengths_B)
    return float(kernel_check.error(got, wanted))


def contiguous(pages_BN, axes, leaf):
    """A pool of pages as a cache that holds them in order; anything else as it is."""
    if leaf is None or pages_BN is None or "B" not in axes or "S" not in axes:
        return leaf
    return online.contiguous(leaf, pages_BN, axes.index("S"))


def on_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip(f"it compiles for a GPU, and the backend is {jax.default_backend()}")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_compiled_decode_kernel_meets_the_float32_oracle(case):
    on_gpu()
    assert difference(call_of(*case), interpret=False) < kernel_check.TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "how"), [("mla", "contiguous"), ("gqa", "paged"), ("lrkv-full", "paged")]
)
def test_the_same_check_runs_interpreted_on_a_cpu(variant, how, monkeypatch):
    monkeypatch.setattr(plans, "MULTIPROCESSORS", 1)
    found = call_of("quickstart", variant, 1, how)
    assert difference(found, interpret=True) < kernel_check.TOLERANCE


def gradients_differ(impl, scale, T):
    """Largest difference of attention's output or gradients over the oracle's largest value."""
    model = load_config(f"configs/{scale}.yaml").model
    H, K = model.heads, model.head_width
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, weight = (jax.random.normal(key, (2, T, H, K), jnp.bfloat16) for key in keys)

    def oracle(q, k, v):
        return reference.grouped_decode(q, k, v, jnp.full(2, T), scale=K**-0.5)[0]

    def ours(q, k, v):
        return flash.causal_attention(q, k, v, scale=K**-0.5, impl=impl)

    def answer(attend):
        out, back = jax.vjp(attend, q, k, v)
        return out, *back(weight.astype(out.dtype))

    pairs = zip(answer(jax.jit(ours)), answer(jax.jit(oracle)), strict=True)
    return max(float(jnp.abs(jnp.float32(a) - b).max() / jnp.abs(b).max()) for a, b in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("impl", flash.IMPLEMENTATIONS[1:])
def test_attention_over_whole_sequences_and_its_gradients_meet_the_float32_oracle(impl, scale):
    on_gpu()
    assert gradients_differ(impl, scale, 1024) < GRADIENT_TOLERANCE


@pytest.mark.slow
def test_the_check_of_gradients_runs_on_a_cpu():
    assert gradients_differ("chunked", "quickstart", 24) < GRADIENT_TOLERANCE
