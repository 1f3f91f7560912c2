"""The float32 oracles and the XLA paths, each against the definition in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decode_cases import compare, grouped_case, latent_case, lrkv_case, private_case

from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels import angles, dispatch, online

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


@pytest.mark.parametrize("name", CASES)
def test_the_oracle_is_the_definition_in_float64(name):
    case = CASES[name]
    assert max(compare(case.oracle(), case.truth())) < 2e-6


# In one chunk, one for each kernel; in chunks, all.
@pytest.mark.parametrize(
    ("name", "chunk"),
    [*((name, 4) for name in CASES), *((name, 512) for name in ("gqa", "mla", "lrkv-full"))],
)
def test_the_xla_path_meets_float64_and_ignores_what_was_never_written(name, chunk, monkeypatch):
    """In one chunk, and in chunks of which the last reaches back."""
    monkeypatch.setattr(online, "default_chunk", lambda S, small_batch, values, **_: min(S, chunk))
    monkeypatch.setattr(angles, "default_chunk", lambda S, values: min(S, chunk))
    case = CASES[name]
    assert max(compare(case.poisoned().run(impl="xla"), case.truth())) < 1e-5


@pytest.mark.parametrize(
    "case",
    [
        lambda **of: grouped_case(**of, H=2, G=1, K=8),
        lambda **of: latent_case(**of, H=2, C=8, P=4),
        lambda **of: latent_case(**of, mode="full", H=2, K=8, C=8),
        lambda **of: private_case(**of, mode="full", H=2, G=1, K=8, R=3),
        lambda **of: lrkv_case(**of, H=2, K=8, R=3),
    ],
    ids=["grouped", "latent", "latent-full", "latent-private", "lrkv"],
)
def test_the_xla_path_reads_pages_to_a_contiguous_caches_bits(case, monkeypatch):
    """In chunks of two pages, of three."""
    monkeypatch.setattr(online, "default_chunk", lambda S, small_batch, values, **_: 128)
    monkeypatch.setattr(angles, "default_chunk", lambda S, values: 128)
    case = case(lengths=[150, 64, 0], S=192).poisoned()
    for paged, whole in zip(case.paged().run(impl="xla"), case.run(impl="xla"), strict=True):
        assert np.array_equal(paged, whole) and np.isfinite(whole).all()


@pytest.mark.parametrize(
    ("how", "slots"),
    [
        ({"values": 128}, 512),
        ({"values": 128, "single_sequence": True}, 2048),
        ({"values": 512, "single_sequence": True}, 1024),  # 2 MB of float32
        ({"values": 768}, 512),
        ({"values": 18 * 128 * 4}, 128),
        ({"values": 128, "S": 300}, 300),
    ],
)
def test_a_chunk_s_keys_stay_in_a_cpu_s_cache(how, slots):
    assert online.default_chunk(**{"S": 8192, "small_batch": True, **how}) == slots


@pytest.mark.parametrize("name", ["gqa", "mla", "lrkv-full"])
def test_the_xla_path_in_bfloat16_stays_within_rounding(name):
    case = CASES[name].astype("bfloat16")
    assert max(compare(case.poisoned().run(impl="xla"), case.truth())) < 4e-3


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 6, 7, 8, 13, 20]), min_size=1, max_size=3),
    tokens=st.integers(1, 8),
    rank=st.integers(0, 16),
    mode=st.sampled_from(["full", "shared", "latent"]),
    chunk=st.sampled_from([7, 8, 20]),
)
def test_the_xla_path_meets_float64_at_any_shape(lengths, tokens, rank, mode, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(online, "default_chunk", lambda S, small_batch, values, **_: min(S, chunk))
        patch.setattr(angles, "default_chunk", lambda S, values: min(S, chunk))
        case = lrkv_case(lengths, mode, T=tokens, S=20, H=2, K=16, R=rank)
        assert max(compare(case.poisoned().run(impl="xla"), case.truth())) < 1e-5


def test_an_unknown_implementation_is_named():
    with pytest.raises(LrkvError, match="'cuda' is unknown: use auto, xla, mosaic, interpret"):
        CASES["mha"].run(impl="cuda")


def test_a_kernel_forced_without_its_gpu_is_one_line():
    with pytest.raises(LrkvError, match="cannot run as mosaic: .*; use xla") as error:
        CASES["mha"].run(impl="mosaic")
    assert "\n" not in str(error.value)


def test_a_query_that_sees_nothing_gets_zero():
    out, lse = CASES["mqa"].run(impl="xla")
    assert not np.asarray(out)[1].any()
    assert (np.asarray(lse)[1] == -1e30).all()


def test_a_choice_is_logged_once_and_can_be_asked_for(caplog):
    dispatch._log_once.cache_clear()
    with caplog.at_level("INFO", logger="lrkv_jax.kernels"):
        for lengths in ([5, 3], [4, 2]):
            grouped_case(lengths, G=4, K=16).run(impl="auto")
    said = [record.message for record in caplog.records if "grouped_decode" in record.message]
    assert said == ["grouped_decode runs on xla: the backend is cpu, not a GPU"]
    assert dispatch.choices()["grouped_decode"] == "xla: the backend is cpu, not a GPU"
