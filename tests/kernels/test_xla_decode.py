"""The XLA paths against the definitions in float64."""

import math
from functools import partial

import jax
import numpy as np
import pytest
from support.decode_cases import compare, grouped_case, latent_case, lrkv_case, private_case
from support.jaxprs import equations
from support.marks import quick

from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels import angles, online

CASES = {
    "mha": grouped_case([5, 3], G=4, K=16),
    "gqa": grouped_case([5, 3], T=2, G=2, K=16),
    "mqa": grouped_case([5, 0], T=3, G=1, K=16),
    "mla": latent_case([5, 3], T=2, C=24, P=8),
    "mla-no_rope": latent_case([5, 3], T=2, C=24, P=0),
    "mla-full": latent_case([9, 4], "full", T=2, G=2, K=16, C=24),
    "mla-no_norm": latent_case([9, 4], "full", K=16, C=24, norm=False),
    "mla-full-private": private_case([9, 4], "full", T=2),
    "mla-private": private_case([9, 4], "decoupled", T=3, G=4),
    "mla-private-one_query": private_case([9, 4], "decoupled", G=4),
    "lrkv-full": lrkv_case([9, 4], "full", T=2, K=16),
    "lrkv-shared": lrkv_case([9, 4], "shared", T=2, K=16, R=3),
    "lrkv-latent": lrkv_case([9, 4], "latent", T=2, G=2, K=16, R=8),
    "lrkv-rank_0": lrkv_case([9, 4], R=0, K=16),
    "lrkv-no_norm": lrkv_case([9, 4], norm=False, K=16),
}


# One of each kernel, a length of 0 among them, and MLA's latents of heads.
EACH = quick("mqa", "mla-full-private", "lrkv-full", slow=CASES)


@pytest.fixture
def chunks(monkeypatch):
    """A function (slots) that makes the chunks of a cache so long."""

    def of(slots):
        monkeypatch.setattr(online, "default_chunk", lambda S, *_, **__: min(S, slots))
        monkeypatch.setattr(angles, "default_chunk", lambda S, values: min(S, slots))

    return of


@pytest.mark.parametrize("name", EACH)
def test_the_xla_path_meets_float64_and_what_was_never_written_is_ignored(name, chunks):
    """In chunks of which the last reaches back; of one, tests/models/attention/test_contract.py."""
    chunks(4)
    case = CASES[name]
    assert max(compare(case.poisoned().run(impl="xla"), case.truth())) < 1e-5


PAGED = {
    "grouped": partial(grouped_case, H=2, G=1, K=8),
    "latent": partial(latent_case, H=2, C=8, P=4),
    "private": partial(private_case, mode="full", H=2, G=1, K=8, R=3),
    "lrkv": partial(lrkv_case, H=2, K=8, R=3),
}


@pytest.mark.parametrize("name", quick("lrkv", slow=PAGED))
def test_the_xla_path_reads_pages_to_a_contiguous_caches_bits(name, chunks):
    """In chunks of two pages, of three."""
    chunks(128)
    case = PAGED[name]([150, 64, 0], S=192).poisoned()
    for paged, whole in zip(case.paged().run(impl="xla"), case.run(impl="xla"), strict=True):
        assert np.array_equal(paged, whole) and np.isfinite(whole).all()


@pytest.mark.parametrize("name", PAGED)
def test_an_accelerator_gathers_a_chunk_of_pages_whatever_the_longest_request_is(name, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    case = PAGED[name]([150, 64, 0], S=2048).paged()

    def largest(pages_BN):
        program = partial(case.program(impl="xla"), pages_BN=pages_BN)
        jaxpr = jax.make_jaxpr(program)(*case.arrays, case.lengths_B).jaxpr
        shapes = [out.aval.shape for one in equations(jaxpr) for out in one.outvars]
        # In `full` there are the residual's logits, [S, B, T, H].
        return max(math.prod(shape) for shape in shapes if shape[:1] != (64 * pages_BN.shape[1],))

    assert largest(np.tile(case.pages_BN, 16)) <= largest(case.pages_BN)


def test_an_implementation_that_is_unknown_or_without_its_gpu_is_one_line():
    with pytest.raises(LrkvError, match="'cuda' is unknown: use auto, xla, mosaic, interpret"):
        CASES["mha"].run(impl="cuda")
    with pytest.raises(LrkvError, match="cannot run as mosaic: .*; use xla") as error:
        CASES["mha"].run(impl="mosaic")
    assert "\n" not in str(error.value)
    with pytest.raises(LrkvError, match="cannot run as interpret: it reads no windows; use xla"):
        CASES["mha"].run(impl="interpret", window=8)
