"""A compiled decode kernel is checked against XLA on the device before it decodes for a user.

There is no GPU here: the process under test is made to believe in one, and what it would compile
is planted where the compiled kernel is. All else is as on a GPU.
"""

import functools
import logging
import threading
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from support.decode_cases import compare, grouped_case, latent_case, lrkv_case
from support.meshes import mesh_of

from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels import dispatch, grouped_decode
from lrkv_jax.kernels.gpu import kernel_check
from lrkv_jax.kernels.gpu import plan as plans


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch):
    """A small GPU that is not there, and nothing known of its kernels."""
    monkeypatch.setattr(dispatch, "_missing_gpu", lambda: None)
    monkeypatch.setattr(plans, "MULTIPROCESSORS", 4)
    kernel_check.failure_reason.cache_clear()
    dispatch._log_once.cache_clear()


@pytest.fixture
def plant(monkeypatch):
    """Put another in the place of the compiled kernel."""
    return lambda kernel: monkeypatch.setitem(grouped_decode.__globals__, "_mosaic", kernel)


def case_of(lengths=(5, 16), **changes):
    shape = {"S": 16, "H": 4, "G": 2, "K": 16, **changes}
    return grouped_case(lengths, **shape).astype("bfloat16")


CASE = case_of()
truth = functools.cache(CASE.truth)


def differs():
    """How far the call is from the truth; rounding alone makes it 1e-3."""
    return max(compare(CASE.poisoned().run(impl="auto"), truth()))


def trace(case, **how):
    jax.eval_shape(lambda: case.run(**{"impl": "auto", **how}))


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


xla = grouped_decode.__globals__["_xla"]


def right(plan, q, k, v, pages_BN, lengths_B, scale, interpret):
    return xla(q, k, v, pages_BN, lengths_B, scale)


def off_by_one_percent(plan, *arguments, **more):
    out_BTHK, lse_BTH = right(plan, *arguments, **more)
    return out_BTHK * 1.01, lse_BTH


def reads_a_slot_past_the_length(plan, q, k, v, pages_BN, lengths_B, scale, interpret):
    return xla(q, k, v, pages_BN, lengths_B + 1, scale)


def forgets_the_last_partial_tile(plan, q, k, v, pages_BN, lengths_B, scale, interpret):
    lengths_B = jnp.where(lengths_B > 64, lengths_B // 64 * 64, lengths_B)
    return xla(q, k, v, pages_BN, lengths_B, scale)


def raises(plan, *arguments, **more):
    raise NotImplementedError("no such\ninstruction")


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (off_by_one_percent, "it differs from XLA by 1.*e-02"),
        (reads_a_slot_past_the_length, "it gives values that are not numbers"),
        (forgets_the_last_partial_tile, "it differs from XLA by"),
        (raises, "it fails with NotImplementedError: no such instruction"),
    ],
)
def test_a_planted_kernel_never_runs_and_one_warning_names_the_shape_and_the_error(
    planted, said, plant, caplog
):
    plant(planted)
    assert differs() < 4e-3
    trace(CASE)
    (line,) = warnings(caplog)
    assert line.startswith(
        "grouped_decode runs on xla: the compiled kernel failed its check on this cpu with "
        "bfloat16[8,1,4,16] bfloat16[8,"
    )
    assert line.endswith("; please report this line") and "\n" not in line
    message = f"cannot run as mosaic: .*{said}.*; use xla"
    with pytest.raises(LrkvError, match=message) as error:
        trace(CASE, impl="mosaic")
    assert "\n" not in str(error.value)


def test_a_kernel_that_hangs_is_one_line_and_not_a_process_that_waits(monkeypatch):
    monkeypatch.setattr(kernel_check, "SECONDS", 0.1)
    monkeypatch.setattr(kernel_check, "_compare", lambda call: threading.Event().wait())
    with pytest.raises(LrkvError, match=r"hangs .* bfloat16\[8,.*set model.decode_kernel = xla"):
        trace(CASE)


def test_a_right_kernel_runs_and_is_checked_once(plant, monkeypatch, caplog):
    plant(right)
    compared, compare = [], kernel_check._compare
    monkeypatch.setattr(kernel_check, "_compare", lambda c: compared.append(c) or compare(c))
    assert differs() < 4e-3
    for _ in range(2):
        trace(CASE)
        assert dispatch.choices()["grouped_decode"] == "mosaic: it equals XLA on this GPU"
    (call,) = compared
    assert call.mosaic is right and not warnings(caplog)


def test_the_check_runs_while_a_call_is_traced_for_a_mesh(plant):
    plant(right)
    call = partial(grouped_decode, scale=0.5)
    rows = PartitionSpec("data")
    with jax.set_mesh(mesh_of(data=2)):
        mapped = jax.shard_map(call, in_specs=rows, out_specs=rows, check_vma=False)
        jax.eval_shape(mapped, *CASE.arrays, CASE.lengths_B)
    assert dispatch.choices()["grouped_decode"].startswith("mosaic")


def test_a_family_is_what_changes_the_kernel_and_nothing_else(monkeypatch):
    checked = []
    monkeypatch.setattr(kernel_check, "failure_reason", lambda c: checked.append(c) or "none runs")

    def families(case, **how):
        trace(case, **how)
        return len(set(checked))

    for lengths in ([5, 16], [5, 16, 3], [4]):
        for slots in (16, 4096):  # another batch and cache
            assert families(case_of(lengths, S=slots)) == 1
    shape = {"S": 64, "H": 2, "K": 16}
    cases = [
        *(case_of(**other) for other in ({"T": 3}, {"T": 4}, {"H": 8}, {"G": 1}, {"K": 24})),
        *(lrkv_case([9, 4], mode, R=R, **shape) for mode in ("full", "shared") for R in (5, 16)),
        lrkv_case([9, 4], R=0, **shape), lrkv_case([9, 4], R=5, norm=False, **shape),
        latent_case([9, 4], S=64, H=2, C=24, P=8), latent_case([9, 4], S=64, H=2, C=24, P=0),
        latent_case([9, 4], S=64).paged(), lrkv_case([9, 4], **shape).paged(),
    ]  # fmt: skip
    for count, case in enumerate(cases):
        assert families(case.astype("bfloat16")) == count + 2
    longer = lrkv_case([9, 70], **{**shape, "S": 128}).paged()
    assert families(longer.astype("bfloat16")) == len(cases) + 1
    assert families(case_of().astype("float16")) == len(cases) + 2
    scaled = partial(grouped_decode, scale=0.25)
    assert families(case_of(), program=scaled) == len(cases) + 3
