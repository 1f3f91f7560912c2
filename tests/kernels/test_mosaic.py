"""The Mosaic decode kernel: interpreted on a CPU, lowered for CUDA, compiled for an H200.

The interpreter runs the kernel's threads, barriers and copies, and raises on a race. Caches are NaN
wherever no token was written.
"""

import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from support import targets
from support.decode_cases import compare, grouped_case, latent_case, lrkv_case, private_case
from support.marks import quick

from lrkv_jax.config.rope import RopeScaling
from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels import dispatch
from lrkv_jax.kernels.gpu import kernel_check, schedule
from lrkv_jax.kernels.gpu import plan as plans
from lrkv_jax.models.rope import frequencies

LLAMA3 = RopeScaling(kind="llama3", factor=8, original_context=8192)
TILE = 64
# Ragged: below, at and above a tile; several tiles; a sequence that is empty.
# Slots of which the last ones are a part of a tile, and slots in whole pages.
LENGTHS, SLOTS, PAGES = (TILE, 3, 2 * TILE + 2, 0), 136, 3 * TILE
# Fewer for the fast set: below a tile, and into a second one; empty.
FEW = (3, TILE + 2, 0)
CASES = {
    "lrkv-full": lambda: lrkv_case(FEW, "full", S=TILE + 8, H=2, K=128, R=46),
    "gqa-3_queries": lambda: grouped_case(FEW, S=2 * TILE, T=3, H=4, G=2, K=64),
    "mla-8_queries": lambda: latent_case(FEW, S=2 * TILE, T=8, H=2, C=128, P=64),
    "mha": lambda: grouped_case(LENGTHS, S=SLOTS, H=2, G=2, K=128),
    "lrkv-shared": lambda: lrkv_case(LENGTHS, "shared", S=PAGES, H=4, K=64, R=5),
    "mqa-8_queries": lambda: grouped_case(LENGTHS, S=PAGES, T=8, H=6, G=1, K=128),
    "mla-no_rope": lambda: latent_case(LENGTHS, S=SLOTS, H=18, C=192, P=0),
    "lrkv-latent": lambda: lrkv_case(LENGTHS, "latent", S=SLOTS, T=2, H=6, G=3, K=128, R=46),
    "lrkv-full-8_queries": lambda: lrkv_case(LENGTHS, "full", S=PAGES, T=8, H=3, K=128, R=51),
    "lrkv-rank_0": lambda: lrkv_case(LENGTHS, S=PAGES, H=6, K=128, R=0),
    # At the frequencies of Llama 3.1.
    "lrkv-rank_128": lambda: lrkv_case(
        LENGTHS, "full", S=SLOTS, H=2, K=128, R=128, turns_J=frequencies(128, 5e5, LLAMA3)
    ),
    "lrkv-no_norm": lambda: lrkv_case(LENGTHS, "full", S=SLOTS, H=6, G=2, K=128, R=33, norm=False),
}


@pytest.fixture
def short_pieces(monkeypatch):
    """Pieces of one tile, so that a short sequence has several, which are joined."""
    monkeypatch.setattr(schedule, "PIECE", 1)


@functools.cache
def interpreted(name):
    return CASES[name]().poisoned().run(impl="interpret")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_interpreted_kernel_meets_float64(name, short_pieces):
    assert max(compare(interpreted(name), CASES[name]().truth())) < 1e-5


def same_bits(got, wanted):
    return all(np.array_equal(*pair) for pair in zip(got, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gqa-3_queries",
        "mla-8_queries",
        "mqa-8_queries",
        "lrkv-full-8_queries",
        "lrkv-shared",
        "lrkv-rank_0",
    ],  # fmt: skip
)
def test_pages_give_the_bits_of_a_contiguous_cache(name, short_pieces):
    paged = CASES[name]().poisoned().paged()
    assert same_bits(paged.run(impl="interpret"), interpreted(name))


def moved(case, order, seed):
    """The case's sequences in another order, and -1 for one of the same cache that is empty."""
    order = np.array(order)
    lengths_B = np.where(order < 0, 0, case.lengths_B[order])
    rows = jax.tree.map(
        lambda names, a: a if a is None or not names.startswith("B") else a[order],
        case.axes,
        case.arrays,
    )
    return replace(case, arrays=rows, lengths_B=lengths_B).poisoned().paged(seed)


# Sequence 0 has five pieces, the last one short: more than are joined at once.
THREE = {"lengths": (4 * TILE + 5, 3, 3 * TILE), "S": 5 * TILE}
ALONE = {
    "mqa-3_queries": lambda: grouped_case(**THREE, T=3, H=4, G=1, K=64),
    "mla": lambda: latent_case(**THREE, H=4, C=128, P=64),
    "lrkv-full": lambda: lrkv_case(**THREE, mode="full", H=2, K=128, R=46),
    "lrkv-shared": lambda: lrkv_case(**THREE, mode="shared", H=4, K=64, R=5),
}


def sequence_0(program, case, order, seed=0):
    """What the first sequence gets in another order of the batch, in pages."""
    found = moved(case, order, seed).run(program)
    return [np.asarray(array)[order.index(0)] for array in found]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_the_bits_of_a_sequence_depend_on_itself_alone(name, short_pieces):
    case = ALONE[name]()
    program = case.program(impl="interpret")
    first = sequence_0(program, case, [0, -1, -1])
    assert max(compare(first, [array[0] for array in case.truth()])) < 1e-5
    for order in ([2, 1, 0], [1, 0, -1]):
        assert same_bits(sequence_0(program, case, order, seed=sum(order)), first), order


REFUSED = {
    "head width = 72: the kernel takes a multiple of 8 up": lambda: grouped_case([8], K=72),
    "9 queries a sequence: the kernel takes 1 to 8": lambda: grouped_case([8], T=9),
    "a cache of 9 slots: the kernel takes a multiple of 8": lambda: grouped_case([9]),
    "pages of 8 slots: the kernel takes 64": lambda: replace(
        grouped_case([8]), pages_BN=np.int32([[0]])
    ),
    "it rebuilds no keys from a latent of all heads": lambda: latent_case([8], "full", C=64),
    "it reads one latent of all heads, and no": lambda: private_case([8], "decoupled"),
    "rope-key width = 4: the kernel takes a multiple of 8": lambda: latent_case([8], P=4),
    "head width = 192: the kernel rotates keys of up to 128": lambda: lrkv_case([8], K=192),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_shape_the_kernel_cannot_take_is_refused_if_forced(message):
    with pytest.raises(LrkvError, match=f"cannot run as interpret: {message}") as error:
        jax.eval_shape(lambda: REFUSED[message]().run(impl="interpret"))
    assert "\n" not in str(error.value)


def test_a_gpu_would_not_take_a_float32_cache():
    shape = {"T": 1, "slots": 64, "paged": False, "H": 1, "G": 1, "key_widths": (64,)}
    found = [plans.find(d, {}, "auto", **shape, value_width=64) for d in ("float32", "bfloat16")]
    assert found[0] == (None, "a float32 cache: the kernel takes bfloat16 or float16")
    assert found[1][0] and found[1][1] is None


@pytest.fixture
def pretend_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "_missing_gpu", lambda: None)
    monkeypatch.setattr(kernel_check, "failure_reason", lambda call: None)


@pytest.mark.parametrize("variant", quick("lrkv-full", slow=targets.VARIANTS))
def test_it_lowers_for_cuda(variant, pretend_gpu):
    """The interpreter does not see a layout, or an amount of shared memory, that a GPU refuses."""
    # Eight queries for every other one: `.ci/run cuda` compiles all kernels for both.
    queries = 1 + 7 * (targets.VARIANTS.index(variant) % 2 and variant != "lrkv-full")
    assert "mosaic_gpu" in targets.lower("2.5b", variant, queries)


@pytest.mark.cuda
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="compiling for an H200 needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt",
)
def test_every_kernel_of_the_scales_compiles_for_an_h200_without_register_spills():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
                   "JAX_ENABLE_COMPILATION_CACHE": "false"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, targets.__file__],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    every = {
        f"{scale}/{variant}/{T}/paged"
        for scale, variant, T in itertools.product(targets.SCALES, targets.VARIANTS, (1, 8))
    }
    assert every <= {name for row in rows for name in row["same"]}

    assert {row["name"].split("/")[1] for row in rows if row["name"].endswith("contiguous")} >= {
        "mla", "lrkv-full", "lrkv-shared"
    }  # fmt: skip
    assert {row["name"]: row["spilled"] for row in rows if row["spilled"]} == {}
    assert all(row["registers"] for row in rows), "ptxas's reports were not read"
    # A warpgroup that asks for more than the others leave waits for ever.
    assert {row["name"]: row["asked"] for row in rows if row["asked"] > row["given"]} == {}
