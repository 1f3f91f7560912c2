"""The scripts of Tables 10 to 12: counted, measured, and never a time that was not taken."""

import functools
import importlib.util
from pathlib import Path

import pytest

import lrkv_jax
from lrkv_jax.artefacts import write_table

EXPERIMENTS = Path(lrkv_jax.__file__).parents[1] / "experiments"


def script(name):
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def short_run(load, scale, overrides):
    """The run with few layers, at a context that is filled in a moment."""
    return load(scale, [*overrides, "model.layers=2", "train.context=64"])


def values(table):
    return [[cell.value for cell in row.cells] for row in table.rows]


def test_measured_caches_are_their_formulas_beside_what_is_printed(monkeypatch):
    table12 = script("table12_cache_bytes")
    monkeypatch.setattr(table12, "SCALES", ("128m",))
    monkeypatch.setattr(table12, "VARIANTS", ("mha", "mla", "lrkv"))
    short = functools.partial(short_run, table12.load_config)
    monkeypatch.setattr(table12, "load_config", short)
    table = table12.measured()
    for row in table.rows:
        *_, published, _, allocated, measured, _ = row.cells
        assert measured.value == allocated.value >= published.value
        assert not measured.note
    assert [row.cells[6].printed.text for row in table.rows] == ["72.0", "24.0", "48.0"]
    lrkv = table.rows[-1].cells
    assert (lrkv[1].value, lrkv[2].value) == (2, "rank 46, rope full")
    assert "Rank 64" in lrkv[6].printed.verdict


def test_printed_caches_are_solved_for_rank_64_and_36_layers():
    rows = values(script("table12_cache_bytes").explained())
    lrkv = [row for row in rows if row[0] == "LRKV"]
    assert [row[2] for row in lrkv] == [12, 36, 36]
    assert [row[3] for row in lrkv] == ["rank 64.0"] * 3
    assert [row[5] for row in lrkv] == ["rank 46.0", "rank 54.8", "rank 53.7"]
    mla = [row for row in rows if row[0] == "MLA"]
    assert [row[3] for row in mla] == ["latent 512", "latent 1536", "latent 2048"]


@pytest.mark.slow
def test_every_scale_s_cache_is_allocated_and_weighed():
    table = script("table12_cache_bytes").measured()
    assert len(table.rows) == 25
    assert all(row.cells[5].value == row.cells[6].value for row in table.rows)


def test_formulas_as_written_give_the_bytes(monkeypatch):
    table11 = script("table11_cache_shapes")
    monkeypatch.setattr(table11, "SCALES", ("2.5b",))
    for row in table11.formulas().rows:
        _, paper, papers, ours, allocated, measured = (cell.value for cell in row.cells)
        model = table11.load_config(row.block, [f"attention={row.cells[0].value.lower()}"]).model
        entry = model.attention
        names = {
            "H": model.heads, "K": model.head_width, "C": getattr(entry, "latent", 0),
            "P": getattr(entry, "rope_width", 0), "R": getattr(entry, "rank", 0),
            "Q": getattr(entry, "cached_rank", 0), "G": getattr(entry, "kv_heads", 0),
        }  # fmt: skip
        for text, given in ((paper, papers), (ours, allocated)):
            assert eval(text.replace("·", "*").replace("R'", "Q"), names) == given
        assert measured == allocated


def test_arrays_are_those_of_the_live_cache(monkeypatch):
    table11 = script("table11_cache_shapes")
    monkeypatch.setattr(table11, "VARIANTS", ("mla", "lrkv"))
    rows = values(table11.arrays())
    assert [row[1] for row in rows if row[0] == "LRKV"] == [
        "k_shared", "v_shared", "rk", "rv", "inverse_norm",
    ]  # fmt: skip
    assert ["MLA", "latent", "batch, slots, latent", "1 × 2,048 × 128", "bfloat16"] in rows


def row(**changes):
    return {
        "level": "attention", "scale": "128m", "variant": "mha", "rope": None, "batch": 1,
        "implementation": "xla", "length": 512, "ragged": False, "dtype": "float32", "layers": 1,
        "status": "measured", "reason": None, "samples": 5, "us": 500.0,
        "us_first_quartile": 400.0, "us_third_quartile": 650.0,
    } | changes  # fmt: skip


def report(*rows, backend="cpu"):
    return {
        "backend": backend, "device": "a processor", "cores": 2, "load_average": 0.5,
        "versions": {"jax": "1"}, "date": "2026-01-01T00:00", "rows": list(rows),
    }  # fmt: skip


def test_times_are_the_fastest_of_our_own_and_what_was_not_taken_is_a_gap(tmp_path):
    table10 = script("table10_memory_latency")
    measured = report(
        row(),
        row(implementation="mosaic", us=90.0, us_first_quartile=80.0, us_third_quartile=95.0),
        row(implementation="pallas", us=1.0),  # a peer's
        row(length=2048, status="skipped", reason="6 GB needed", us=None),
        row(variant="lrkv", rope="full", length=2048, us=2000.0),
    )
    times, gpu = table10.times([measured], table10.LINES)
    assert "a processor (cpu)" in times.title and "5 samples" in times.caption
    assert values(times) == [
        ["MHA", "0.09 [0.08, 0.095]", None],
        ["LRKV, rope full", None, "2 [0.4, 0.65]"],
    ]
    assert times.gaps == ["6 GB needed", "not asked: 512 tokens"]
    assert all(cell.value is None and cell.gap for line in gpu.rows for cell in line.cells[1:])
    assert [path.suffix for path in write_table(gpu, tmp_path, "gpu")] == [".md", ".tex", ".json"]
    only = table10.times([report(row(), backend="gpu")], table10.LINES)
    assert [table.name for table in only] == ["ms_1"]


def test_costs_say_that_lrkv_s_work_grows_with_the_cache():
    table10 = script("table10_memory_latency")
    rows = {(r.block.split(",")[0], r.cells[0].value): r for r in table10.costs().rows}
    mha, shared, full = (
        rows["128m", name].cells for name in ("MHA", "LRKV, rope shared", "LRKV, rope full")
    )
    assert mha[3].value == pytest.approx(12 * 4 * 6 * 128 / 1e3)
    assert shared[3].value / mha[3].value == pytest.approx(1 + 46 / 128)
    assert full[3].value > 20 * mha[3].value
    assert shared[9].value == "None" and "depend on T" in shared[9].note
    assert shared[8].value == pytest.approx(12 * 6 * 46 * 128 / 1e6)
    assert shared[6].value > 60 * shared[8].value  # of what is extra, at 2,048 tokens
