"""A tiny decode benchmark from end to end: what is checked, written and refused."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest
from support.command import lrkv

from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench import clock, decode, report
from lrkv_jax.lab.bench.decode import DecodeBenchmark, DecodeTiming, Implementation, run
from lrkv_jax.lab.bench.problems import with_kernel
from lrkv_jax.lab.bench.report import FAILED, MEASURED, SKIPPED, WRONG

ALONE = DecodeBenchmark(
    scales=("quickstart",), variants=("lrkv",), batches=(2,), lengths=(32,),
    implementations=("xla",), samples=3, ragged=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    """The bandwidth itself is not tested."""
    monkeypatch.setattr(decode, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(clock, "ROTATED_BYTES", 1 << 17)


@pytest.mark.slow
def test_the_command_leaves_consistent_rows_of_which_none_is_missing(capsys, monkeypatch, tmp_path):
    how = ("--scale", "quickstart", "--variants", "mha,lrkv", "--batch", "2", "--length", "32",
           "--impl", "xla,mosaic,jax", "--samples", "3", "--json",
           "--out", str(tmp_path / "new"))  # fmt: skip
    code, out, _ = lrkv(capsys, monkeypatch, "bench", "decode", *how)
    assert code == 0
    swept = json.loads((tmp_path / "new/decode_cpu.json").read_text())
    assert json.loads(out) == swept
    speeds = swept["copy_bytes_per_second"]
    copy = speeds["median"]
    assert 0 < speeds["first_quartile"] <= copy <= speeds["third_quartile"]
    every = [SimpleNamespace(**row) for row in swept["rows"]]
    rows = [row for row in every if row.status == MEASURED]
    names = [(row.variant, row.implementation) for row in rows]
    assert names == [("mha", "xla"), ("mha", "jax"), ("lrkv", "xla")]
    for row in rows:
        assert row.samples == 3 and row.tokens == 2 * row.length
        assert 0 < row.us_first_quartile <= row.us <= row.us_third_quartile
        assert row.bytes_per_second == pytest.approx(row.bytes_to_move / (row.us * 1e-6))
        assert row.share_of_copy == pytest.approx(row.bytes_per_second / copy)
        assert row.error < 1e-4
    assert rows[0].bytes_to_move == 2 * 32 * 2 * 4 * 32 * 4  # 4 heads of 32, in float32
    unmeasured = [row for row in every if row.status != MEASURED]
    assert len(unmeasured) == 6 - 3
    for row in unmeasured:
        assert row.status == SKIPPED and row.implementation in ("mosaic", "jax")
        assert row.us is None and row.reason and "\n" not in row.reason


def test_ratios_are_to_the_fastest_mha_of_the_same_shape():
    def row(variant, us, batch=1, nbytes=100):
        return DecodeTiming("s", variant, "xla", batch, 8, False, 8, "float32", us=us,
                            status=MEASURED if us else WRONG, bytes_to_move=nbytes)  # fmt: skip

    half = row("lrkv", 3.0, nbytes=50)
    rows = [row("mha", 8.0), row("mha", None), row("mha", 4.0), half,
            row("mha", 1.0, batch=2), row("lrkv", 3.0, batch=4)]  # fmt: skip
    report.compare_with_mha(rows, time_over_mha="us", bytes_over_mha="bytes_to_move")
    assert [r.time_over_mha for r in rows] == [2.0, None, 1.0, 0.75, 1.0, None]
    assert half.bytes_over_mha == 0.5


@pytest.mark.slow
def test_what_differs_from_the_reference_or_raises_is_not_timed_and_the_rest_go_on(monkeypatch):
    def off(problem, inputs, cache, lengths_B):
        out, lse = with_kernel(problem, inputs, cache, lengths_B, "xla")
        return out.at[:, :, 1].multiply(1.01), lse

    refuses = Mock(side_effect=LrkvError("no GPU here"))
    fails = Mock(side_effect=RuntimeError("No cuDNN.\nmore"))
    for name, attend in (("mosaic", off), ("jax", refuses), ("cudnn", fails)):
        monkeypatch.setitem(decode.IMPLEMENTATIONS, name, Implementation(attend))
    rows = run(replace(ALONE, implementations=("mosaic", "jax", "cudnn", "xla")))["rows"]
    assert [row.status for row in rows] == [WRONG, SKIPPED, FAILED, MEASURED]
    wrong, skipped, failed, ours = rows
    assert wrong.us is None and wrong.error > 1e-3
    assert "reference" in wrong.reason and "not timed" in wrong.reason
    assert (skipped.reason, failed.reason) == ("no GPU here", "RuntimeError: No cuDNN.")
    assert ours.tokens == 32  # half of 2 · 32


def test_a_program_of_several_calls_takes_each_copy_in_turn(monkeypatch):
    """As on a GPU, where a sample is several programs of several calls."""
    seen = []

    def attend(problem, inputs, cache, lengths_B):
        first = jax.tree.leaves(cache)[0].reshape(-1)[0]
        jax.debug.callback(lambda value: seen.append(float(value)), first)
        return with_kernel(problem, inputs, cache, lengths_B, "xla")

    marks = iter(range(1, 100))
    monkeypatch.setattr(clock, "calls_and_launches", lambda copies: (min(2, copies), 3))
    monkeypatch.setattr(clock, "copies_needed", lambda nbytes, room: 5)
    monkeypatch.setattr(
        decode, "_copy", lambda cache, add=marks: jax.tree.map(lambda a: a * 0 + next(add), cache)
    )
    monkeypatch.setitem(decode.IMPLEMENTATIONS, "xla", Implementation(attend))
    monkeypatch.setattr(decode, "_time", lambda candidates, samples: candidates[0][1]())
    run(ALONE)
    jax.effects_barrier()
    # The check, then two copies a program and three programs: the last of five copies is left out.
    _, _, *timed = seen
    assert len(timed) == 6 and sorted(timed) == sorted([*dict.fromkeys(timed), *timed[:2]])
    assert len(set(timed)) == 4


def test_samples_follow_others_of_their_program_in_rounds_of_random_order(monkeypatch):
    """And slow ones stop early. Else they would pay for what the programs before them did."""
    order = []

    def timer(name, seconds):
        return lambda: order.append(name) or seconds

    taken = clock.interleaved([timer("a", 0.1), timer("b", 1.0)], samples=40, seconds=20, least=3)
    rounds = {tuple(order[i : i + 2]) for i in range(0, 42, 2)}  # the first warms up
    assert rounds == {("a", "b"), ("b", "a")}
    assert [len(times) for times in taken] == [40, 20]
    assert clock.quartiles([4.0, 1.0, 2.0, 3.0, 100.0]) == (2.0, 3.0, 4.0)
    ran = []  # a program takes 3 seconds
    monkeypatch.setattr("time.perf_counter", lambda: 3.0 * len(ran))
    assert clock.timer(ran.append, [(1,), (2,)], calls=5, launches=2)() == 3 / 5
    assert clock.timer(ran.append, [(1,), (2,)], calls=1, launches=1)() == 3.0
    assert ran == [1, 2, 1, 2]  # the last follows another of its program


def test_what_does_not_fit_in_memory_is_skipped_with_the_figures(monkeypatch):
    monkeypatch.setattr(clock, "memory_limit", lambda: 1000)
    (row,) = run(ALONE)["rows"]
    assert row.status == SKIPPED and "GB needed" in row.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("decode --impl cuda", "implementations: cuda is unknown: use xla, mosaic"),
        ("decode --variants mha,foo", "attention = foo is not a variant: use one of mha, gqa"),
        ("decode --batch 0", "batches: 0 is not a size"),
        ("decode model.dtype=bfloat16", "model.dtype: use --dtype"),
        ("decode --length 1k", "--length': 1k: use a whole number"),
        ("train mesh.fsdp=3", "must multiply to the number of devices, 8"),
        ("train train.wdith=4", "unknown key train.wdith"),
        ("train model.layers_pattern=SG model.window=8 --depth 3", "SG, 2 layers, does not divide"),
    ],
)
def test_bad_questions_are_one_line(capsys, monkeypatch, arguments, message):
    code, _, err = lrkv(capsys, monkeypatch, "bench", *arguments.split())
    assert code == 2
    assert err.count("\n") == 1 and err.startswith("lrkv: ") and message in err


def test_a_model_of_windows_alone_is_refused():
    with pytest.raises(LrkvError, match="model.window = 8: a layer reads so many tokens at every"):
        run(replace(ALONE, overrides=("model.window=8",)))
