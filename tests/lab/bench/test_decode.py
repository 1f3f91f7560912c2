"""A tiny sweep from end to end: what is written, printed, drawn and refused."""

import io
import json
import math
from dataclasses import fields, replace

import pytest
from rich.console import Console
from support.command import lrkv

from lrkv_jax.config import load_config
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench import clock, decode, train_table
from lrkv_jax.lab.bench.decode import DecodeBenchmark, run
from lrkv_jax.lab.bench.decode_plot import draw
from lrkv_jax.lab.bench.decode_table import DecodeTiming, print_report
from lrkv_jax.lab.bench.report import MEASURED, SKIPPED, as_json, compare_with_mha, save

TINY = DecodeBenchmark(
    scales=("quickstart",), variants=("mha", "lrkv"), ropes=("full", "shared"),
    batches=(2,), lengths=(32,), implementations=("xla", "mosaic", "jax"), samples=3,
)  # fmt: skip


@pytest.fixture(scope="module")
def swept():
    """One sweep, shared; a small copy and cache, as the bandwidth itself is not tested."""
    steps, turns, timer = [], [], clock.timer

    def noted(program, arguments, *more):
        turns.append((len(arguments), id(more[-1])))
        return timer(program, arguments, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "COPY_BYTES", {"cpu": 4 << 20})
        patch.setattr(clock, "last_level_cache", lambda: 1 << 16)
        patch.setattr(clock, "timer", noted)
        report = run(TINY, lambda *step: steps.append(step))
    return report, steps, turns


def measured(report):
    return [row for row in report["rows"] if row.status == MEASURED]


def test_json_says_where_how_and_what(swept):
    report = json.loads(json.dumps(as_json(swept[0])))
    assert set(report) == {
        "benchmark", "backend", "device", "cores", "load_average", "versions", "date", "command",
        "settings", "copy_bytes_per_second", "dispatch_us", "last_level_cache_bytes",
        "implementations", "rows",
    }  # fmt: skip
    assert report["settings"]["dtype"] == "float32"  # auto, resolved
    assert set(report["versions"]) == {"lrkv_jax", "jax", "jaxlib", "python"}
    copy = report["copy_bytes_per_second"]
    assert 0 < copy["first_quartile"] <= copy["median"] <= copy["third_quartile"]
    assert all(set(row) == {field.name for field in fields(DecodeTiming)} for row in report["rows"])
    # Three variants, three implementations: none is missing.
    assert len(report["rows"]) == 3 * 3
    assert swept[1] == [("quickstart, batch 2, 32 tokens", 0, 1), ("done", 1, 1)]


def test_implementations_take_turns_at_the_copies_of_a_cache(swept):
    """Else one would find in the processor's cache what the one before it has just read."""
    *timers, _ = swept[2]  # the last one measures the dispatch
    assert len(timers) == len(measured(swept[0])) == 4
    assert all(copies > 1 for copies, _ in timers)
    assert len({turns for _, turns in timers}) == 3  # one of each variant


def test_rows_are_consistent(swept):
    copy = swept[0]["copy_bytes_per_second"]["median"]
    rows = measured(swept[0])
    assert {(row.name, row.implementation) for row in rows} == {
        ("mha", "xla"), ("mha", "jax"),
        *((f"lrkv {rope}", "xla") for rope in TINY.ropes),
    }  # fmt: skip
    for row in rows:
        assert row.samples == 3 and row.tokens == 2 * row.length
        assert 0 < row.us_first_quartile <= row.us <= row.us_third_quartile
        assert row.bytes_per_second == pytest.approx(row.bytes_to_move / (row.us * 1e-6))
        assert row.share_of_copy == pytest.approx(row.bytes_per_second / copy)
        assert row.error < 1e-4 and row.temp_bytes >= 0
        assert row.tokens_per_second is None  # a layer makes no tokens
    # 2 sequences of 32 tokens, 4 heads of 32, keys and values in float32.
    assert rows[0].bytes_to_move == 2 * 32 * 2 * 4 * 32 * 4


def test_what_was_not_measured_says_why(swept):
    kept = [row for row in swept[0]["rows"] if row.status != MEASURED]
    assert all(row.us is None and row.reason and "\n" not in row.reason for row in kept)
    assert {row.status for row in kept} == {SKIPPED}
    assert {row.implementation for row in kept} == {"mosaic", "jax"}


def test_ratios_are_to_the_fastest_mha_of_the_same_shape():
    def row(variant, by, us, *, batch=1, rope=None, status=MEASURED, bytes_to_move=100):
        return DecodeTiming(
            "attention", "s", variant, rope, by, batch, 8, False, 8, "float32",
            us=us, status=status, bytes_to_move=bytes_to_move,
        )  # fmt: skip

    slow, fast = row("mha", "xla", 8.0), row("mha", "jax", 4.0)
    wrong = row("mha", "cudnn", None, status="wrong")
    other = row("mha", "xla", 1.0, batch=2)
    lrkv = row("lrkv", "xla", 3.0, rope="full", bytes_to_move=50)
    alone = row("lrkv", "xla", 3.0, batch=4)
    shared = row("lrkv", "xla", 1.5, rope="shared")
    rows = [slow, wrong, fast, other, lrkv, shared, alone]
    compare_with_mha(rows, time_over_mha="us", bytes_over_mha="bytes_to_move")
    assert [r.time_over_mha for r in rows] == [2.0, None, 1.0, 1.0, 0.75, 0.375, None]
    assert lrkv.bytes_over_mha == 0.5


@pytest.mark.parametrize("columns", [80, 100])
def test_tables_fit_the_terminal_and_hold_every_row(swept, columns):
    console = Console(width=columns, record=True, file=io.StringIO())
    print_report(swept[0], console)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= columns and not any("…" in line for line in lines)
    shown = [line for line in lines if line.startswith((" mha ", " lrkv "))]
    assert len(shown) == len(measured(swept[0]))
    text = " ".join(" ".join(lines).split())
    for said in ("copies at", "whole keys", "fastest MHA timed together"):
        assert said in text


LONG = [("mha", None), ("lrkv_r128", "latent")]


def long_decode_row(variant, rope, level):
    return DecodeTiming(
        level, "128m", variant, rope, "mosaic", 64, 32768, False, 32768, "bfloat16", us=123456.7,
        us_first_quartile=1.2e5, us_third_quartile=1.3e5, tokens_per_second=12345.6,
        bytes_to_move=10**9, share_of_copy=0.5, time_over_mha=10.12, bytes_over_mha=0.55,
        temp_bytes=3 * 10**8,
    )  # fmt: skip


def long_train_row(variant, rope):
    row = train_table.TrainTiming(
        "1.2b", variant, rope, 4, 4, 4096, 8, 256, 1, "none", "float32", {}, 1, 1
    )
    return replace(
        row, ms=1234.5, ms_first_quartile=1200.0, ms_third_quartile=1300.0, mfu_of_ceiling=0.45,
        tokens_per_second=123456.0, mfu_of_datasheet=0.41, time_over_mha=1.01, flops_over_mha=1.02,
        compile_seconds=12.3, compile_cached=True, state_bytes=10**9, peak_bytes=3 * 10**9,
    )  # fmt: skip


def test_no_figure_and_no_word_is_cut_at_80_columns():
    console = Console(width=80, record=True, file=io.StringIO())
    rows = [long_decode_row(*line, level) for level in ("attention", "step") for line in LONG]
    print_report({**run_stub(), "rows": rows}, console)
    rows = [long_train_row(*line) for line in LONG]
    more = {"rows": rows, "devices": 1, "ceiling": {"side": 2048}}
    train_table.print_report({**run_stub(), **more}, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for whole in (
        "123,457",
        "12,345.6",
        "lrkv_r128",
        "latent",
        "45.0%",
    ):
        assert whole in text


def test_files_hold_the_report_and_a_picture(swept, tmp_path):
    paths = save(swept[0], tmp_path / "new", "-x", draw=draw)
    assert [path.name for path in paths] == ["decode_cpu-x.json", "decode_cpu-x.png"]
    assert json.loads(paths[0].read_text()) == json.loads(json.dumps(as_json(swept[0])))
    import matplotlib.image

    picture = matplotlib.image.imread(paths[1])
    assert picture.shape[0] > 500 and picture.shape[1] > 800 and picture.std() > 0.05


@pytest.mark.slow
def test_a_whole_step_is_measured_as_such(monkeypatch):
    monkeypatch.setattr(decode, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(clock, "last_level_cache", lambda: 1 << 14)
    settings = replace(
        TINY, variants=("lrkv",), ropes=("full",), lengths=(64,), ragged=True, depth=2,
        levels=("attention", "step"), implementations=("xla",), samples=2,
    )  # fmt: skip
    alone, step = run(settings)["rows"]
    assert (alone.level, step.level) == ("attention", "step")
    assert alone.status == MEASURED and alone.share_of_copy > 0
    assert step.status == MEASURED and step.us > 0 and step.error < 1e-4
    assert step.bytes_per_second is None and step.share_of_copy is None  # weights move too
    assert step.tokens == 64 and step.ragged  # half of 2 · 64
    assert step.layers == 2 and step.tokens_per_second == pytest.approx(2e6 / step.us)
    assert step.bytes_to_move == 2 * alone.bytes_to_move
    console = Console(width=80, record=True, file=io.StringIO())
    print_report({**run_stub(), "rows": [step]}, console)
    (head,) = [line for line in console.export_text().splitlines() if line.startswith(" variant")]
    assert "of copy" not in head and "tokens/s" in head


def run_stub():
    """What a report holds beside its rows."""
    return {
        "device": "a device", "backend": "cpu", "cores": 1, "load_average": 0.0,
        "settings": {"dtype": "float32"}, "versions": {"jax": "0"},
        "copy_bytes_per_second": {"median": 1e9}, "dispatch_us": 1.0,
    }  # fmt: skip


def test_what_does_not_fit_in_memory_is_skipped_with_the_figures(monkeypatch):
    monkeypatch.setattr(decode, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(clock, "memory_limit", lambda: 1000)
    rows = run(replace(TINY, lengths=(32,)))["rows"]
    assert len(rows) == 3 * 3 and {row.status for row in rows} == {SKIPPED}
    assert "GB needed" in rows[0].reason


@pytest.mark.parametrize(
    ("needs", "fits"),
    [
        ([4, 2, 3, 2], [0, 1, 3]),
        ([9, 3, 5], [1, 2]),
    ],
)
def test_variants_are_timed_together_as_far_as_memory_holds_them(needs, fits):
    assert decode.fitting(needs, 8) == fits


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["128m", "512m_8k", "1.2b", "2.5b", "6.3b"])
def test_every_shape_of_a_scale_is_measured_in_8_gb(scale):
    settings = DecodeBenchmark(scales=(scale,), dtype="float32")
    lines = decode._chosen_variants(scale, settings)
    for batch in settings.batches:
        for length in settings.lengths:
            needs = [decode._nbytes(line.config.model, batch, length, settings) for line in lines]
            assert decode.fitting(needs, 8_000_000_000) == list(range(len(lines)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--impl", "cuda"), "implementations: cuda is unknown: use xla, mosaic"),
        (("--variants", "mha,foo"), "attention = foo is not a variant: use one of mha, gqa"),
        (("--rope", "whole"), "ropes: whole is unknown: use one of full, shared, latent, own"),
        (("--level", "head"), "levels: head is unknown: use attention, step"),
        (("--batch", "0"), "batches: 0 is not a size"),
        (("--length", "1k"), "--length 1k: use whole numbers"),
        (("--variants", ","), "variants: nothing is listed"),
        (("--scale", "3b"), "3b: did you mean"),
        (("--dtype", "int8"), "dtype int8 is unknown"),
        (("--samples", "0"), "samples and depth: use 1 or more"),
        (("--level", "step", "--impl", "jax,cudnn"), "jax, cudnn attend alone: a step runs on"),
    ],
)
def test_bad_questions_are_one_line(capsys, monkeypatch, arguments, message):
    code, _, err = lrkv(capsys, monkeypatch, "bench", "decode", *arguments)
    assert code == 2
    assert err.count("\n") == 1 and err.startswith("lrkv: ") and message in err


def test_the_command_prints_json_and_leaves_files(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(decode, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(clock, "last_level_cache", lambda: 1 << 14)
    how = ("--scale", "quickstart", "--variants", "mha", "--batch", "1", "--length", "16",
           "--impl", "xla", "--samples", "2", "--json", "--out", str(tmp_path))  # fmt: skip
    code, out, err = lrkv(capsys, monkeypatch, "bench", "decode", *how)
    assert code == 0
    (row,) = json.loads(out)["rows"]
    assert row["status"] == "measured" and math.isclose(row["time_over_mha"], 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode_cpu.json", "decode_cpu.png"]
    assert "0/1 quickstart, batch 1, 16 tokens" in err  # plain lines: this is no terminal


def test_the_docs_benchmarks_are_of_lines_that_exist_and_leave_their_files(
    experiment, monkeypatch, tmp_path
):
    script = experiment("bench_decode")
    lines = {
        name: [
            line.name for scale in sweep.scales for line in decode._chosen_variants(scale, sweep)
        ]
        for name, sweep in script.SWEEPS.items()
    }
    assert lines["family"] == list(load_config("128m_family").variants)  # each as it stands
    assert "lrkv latent" in lines["128m"]
    monkeypatch.setattr(decode, "COPY_BYTES", {"cpu": 1 << 20})
    tiny = replace(TINY, variants=("lrkv",), ropes=("own",), implementations=("xla",), samples=1)
    script.SWEEPS["family"] = tiny
    monkeypatch.setattr("sys.argv", ["", "--only", "family", "--out", str(tmp_path)])
    script.main()
    (row,) = json.loads((tmp_path / "decode_cpu-family.json").read_text())["rows"]
    assert row["status"] == "measured" and (row["variant"], row["rope"]) == ("lrkv", None)


def test_36x2304_is_the_models_own_shape():
    (line,) = decode._chosen_variants("36x2304", DecodeBenchmark(variants=("mha",)))
    model = line.config.model
    assert (model.layers, model.width, model.heads) == (36, 2304, 18)
    with pytest.raises(LrkvError, match="no configuration"):
        decode._chosen_variants("36x2305", DecodeBenchmark())
