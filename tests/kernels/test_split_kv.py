"""The Mosaic decode kernel: interpreted on a CPU, lowered for CUDA, compiled for an H200.

The interpreter runs the kernel's threads, barriers and copies, and raises on a race. Caches are NaN
wherever no token was written.
"""

import faulthandler
import importlib.util
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import targets
from support.decode_cases import MODES, compare, grouped_case, latent_case, lrkv_case

from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels import dispatch, proof
from lrkv_jax.kernels.split_kv import plan as plans

TILE = 64
# Ragged: below, at and above a tile; several tiles; a sequence that is empty.
LENGTHS, SLOTS = (TILE, 3, 2 * TILE + 2, 0), 136
# Fewer for the fast set: below a tile, and into a second one; empty.
FEW = {"lengths": (3, TILE + 2, 0), "S": TILE + 8}
QUICK = {
    "gqa-3_queries": lambda: grouped_case(**FEW, T=3, H=4, G=2, K=64),
    "mla-8_queries": lambda: latent_case(**FEW, T=8, H=2, C=128, P=64),
    "lrkv-full": lambda: lrkv_case(**FEW, mode="full", H=2, K=128, R=46),
}
SLOW = {
    "gqa-3_queries": lambda: grouped_case(LENGTHS, S=SLOTS, T=3, H=4, G=2, K=64),
    "mla-8_queries": lambda: latent_case(LENGTHS, S=SLOTS, T=8, H=2, C=128, P=64),
    "lrkv-full": lambda: lrkv_case(LENGTHS, "full", S=SLOTS, H=6, K=128, R=46),
    "mha": lambda: grouped_case(LENGTHS, S=SLOTS, H=2, G=2, K=128),
    "lrkv-shared": lambda: lrkv_case(LENGTHS, "shared", S=SLOTS, H=4, K=64, R=5),
    "mqa-8_queries": lambda: grouped_case(LENGTHS, S=SLOTS, T=8, H=6, G=1, K=128),
    "mla-no_rope": lambda: latent_case(LENGTHS, S=SLOTS, H=18, C=192, P=0),
    "lrkv-latent": lambda: lrkv_case(LENGTHS, "latent", S=SLOTS, T=2, H=6, K=128, R=46),
    "lrkv-full-8_queries": lambda: lrkv_case(LENGTHS, "full", S=SLOTS, T=8, H=3, K=128, R=51),
    "lrkv-rank_0": lambda: lrkv_case(LENGTHS, S=SLOTS, H=6, K=128, R=0),
    "lrkv-rank_128": lambda: lrkv_case(LENGTHS, "full", S=SLOTS, H=2, K=128, R=128),
    "lrkv-no_norm": lambda: lrkv_case(LENGTHS, "full", S=SLOTS, H=2, K=128, R=33, norm=False),
}


@pytest.fixture(autouse=True)
def _no_hang():
    """The interpreter waits for ever if its threads get no processor: end the process instead."""
    faulthandler.dump_traceback_later(540, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("name", QUICK)
def test_the_interpreted_kernel_meets_float64(name):
    case = QUICK[name]()
    assert max(compare(case.poisoned().run(impl="interpret"), case.truth())) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_interpreted_kernel_meets_float64_at_more_shapes(name):
    case = SLOW[name]()
    assert max(compare(case.poisoned().run(impl="interpret"), case.truth())) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_interpreted_kernel_in_bfloat16_stays_within_rounding(name):
    case = SLOW[name]().astype("bfloat16")
    assert max(compare(case.poisoned().run(impl="interpret"), case.truth())) < 4e-3


lengths = st.lists(
    st.sampled_from([0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 7]), min_size=1, max_size=9
)
queries = st.integers(1, 8)
slow_property = settings(max_examples=10, deadline=None, derandomize=True)


@pytest.mark.slow
@slow_property
@given(lengths=lengths, T=queries, R=st.integers(1, 128), mode=st.sampled_from(MODES),
       heads=st.sampled_from([1, 2, 3]), K=st.sampled_from([64, 128]))  # fmt: skip
def test_lrkv_meets_float64_at_any_shape(lengths, T, R, mode, heads, K):
    case = lrkv_case(lengths, mode, S=SLOTS, T=T, H=heads, K=K, R=min(R, K))
    assert max(compare(case.poisoned().run(impl="interpret"), case.truth())) < 1e-5


@pytest.mark.slow
@slow_property
@given(lengths=lengths, T=queries, groups=st.sampled_from([1, 2]), each=st.sampled_from([1, 3]),
       K=st.sampled_from([64, 128]))  # fmt: skip
def test_grouped_meets_float64_at_any_shape(lengths, T, groups, each, K):
    case = grouped_case(lengths, S=SLOTS, T=T, H=groups * each, G=groups, K=K)
    assert max(compare(case.poisoned().run(impl="interpret"), case.truth())) < 1e-5


@pytest.mark.slow
@slow_property
@given(lengths=lengths, T=queries, heads=st.sampled_from([1, 3, 4]),
       C=st.sampled_from([24, 64, 192]), P=st.sampled_from([0, 16, 64]))  # fmt: skip
def test_latent_meets_float64_at_any_shape(lengths, T, heads, C, P):
    case = latent_case(lengths, S=SLOTS, T=T, H=heads, C=C, P=P)
    assert max(compare(case.poisoned().run(impl="interpret"), case.truth())) < 1e-5


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (lambda: grouped_case([8], K=72), "head width = 72: the kernel takes a multiple of 8 up"),
        (lambda: grouped_case([8], T=9), "9 queries a sequence: the kernel takes 1 to 8"),
        (lambda: grouped_case([9]), "a cache of 9 slots: the kernel takes a multiple of 8"),
        (lambda: latent_case([8], P=4), "rope-key width = 4: the kernel takes a multiple of 8"),
        (lambda: lrkv_case([8], K=192), "head width = 192: the kernel rotates keys of up to 128"),
    ],
)
def test_a_shape_the_kernel_cannot_take_falls_back_and_is_refused_if_forced(case, message):
    case = case()
    with pytest.raises(LrkvError, match=f"cannot run as interpret: {message}") as error:
        case.run(impl="interpret")
    assert "\n" not in str(error.value)
    assert max(compare(case.run(impl="auto"), case.truth())) < 1e-5


def test_a_gpu_would_not_take_a_float32_cache():
    shape = {"T": 1, "S": 64, "widths": {}}
    assert "float32 cache" in plans.objection("float32", **shape, interpret=False)
    assert plans.objection("bfloat16", **shape, interpret=False) is None


@pytest.fixture
def pretend_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "_missing_gpu", lambda: None)
    monkeypatch.setattr(proof, "doubt", lambda trial: None)


@pytest.mark.parametrize("variant", ["mha", "mla", "lrkv-full"])
def test_it_lowers_for_cuda(variant, pretend_gpu):
    assert "mosaic_gpu" in targets.lower("2.5b", variant, 1)


@pytest.mark.cuda
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="compiling for an H200 needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt",
)
@pytest.mark.parametrize("scale", targets.SCALES)
def test_it_compiles_for_an_h200_without_register_spills(scale):
    names = [f"{scale}/{variant}/{T}" for variant in targets.VARIANTS for T in (1, 8)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
                   "JAX_ENABLE_COMPILATION_CACHE": "false"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, targets.__file__, *names],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["name"] for row in rows] == names
    assert {row["name"]: row["spilled"] for row in rows if row["spilled"]} == {}
    # ptxas's reports were really read. A kernel equal to one before is not compiled again.
    silent = {row["name"].split("/")[1] for row in rows if not row["registers"]}
    assert silent <= {"gqa", "mqa", "lrkv-latent"}
