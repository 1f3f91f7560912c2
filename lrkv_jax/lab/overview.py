"""Runs as a terminal shows them: what each is and how far it is, and two of them side by side."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from matplotlib.ticker import EngFormatter

from lrkv_jax.config import AttentionConfig, RunConfig
from lrkv_jax.config.differences import differences
from lrkv_jax.config.frozen import ROLES
from lrkv_jax.lab.report.comparison.runs import RunRecord
from lrkv_jax.lab.report.figures import Picture, legend_below, panels, style
from lrkv_jax.lab.report.styles import distinct, run_style
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token
from lrkv_jax.training.run_dir import is_training

HEADERS = ("run", "variant", "step", "state", "loss", "bits/byte", "tokens/s", "MB", "age")
BARS = "▁▂▃▄▅▆▇█"


def state_of(run: RunRecord) -> str:
    """How far a run is: finished, training, stopped, or new."""
    if run.finished:
        return "finished"
    if is_training(run.path):
        return "training"
    return "stopped" if run.rows else "new"


def row_of(run: RunRecord) -> dict[str, Any]:
    """What `lrkv runs` says of a run: nats of its last step, its last held-out bits per byte, the
    median speed of its steps, the size of its directory, and seconds since it was last written."""
    files = [path for path in run.path.rglob("*") if path.is_file()]
    last = run.rows[-1] if run.rows else {}
    measured = [row["validation_bpb"] for row in run.rows if row.get("validation_bpb") is not None]
    speeds = [row["tokens_per_second"] for row in run.rows if row.get("tokens_per_second")]
    return {
        "run": str(run.path),
        "variant": run.label,
        "step": run.steps_done,
        "steps": run.config.train.total_steps,
        "state": state_of(run),
        "loss": last.get("loss"),
        "bits_per_byte": measured[-1] if measured else None,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "bytes": sum(path.stat().st_size for path in files),
        "age": time.time() - max(path.stat().st_mtime for path in files),
    }


def as_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """The same as texts, under `HEADERS`; the run by the end of its path."""
    return (
        Path(row["run"]).name, row["variant"], f"{row['step']:,}/{row['steps']:,}", row["state"],
        _number(row["loss"], ".3f"), _number(row["bits_per_byte"], ".4f"),
        _number(row["tokens_per_second"], ",.0f"), f"{row['bytes'] / 1e6:,.1f}", _age(row["age"]),
    )  # fmt: skip


def setting_rows(one: RunConfig, other: RunConfig) -> list[tuple[str, str, str]]:
    """(setting, its value in one, in the other) where two configurations differ.

    Where they lie, and the variants that they do not have, are left out.
    """
    changes = differences(one, other, tuple(ROLES))
    return [
        (change.key, _value(change.old), _value(change.new))
        for change in changes
        if change.key not in ("variants", "run_dir")
    ]


def result_rows(one: RunRecord, other: RunRecord) -> list[tuple[str, str, str]]:
    """(what, of one, of the other): how two runs stand, and what their caches take."""
    rows = list(map(row_of, (one, other)))
    cells = list(map(as_cells, rows))
    named = [(name, cells[0][at], cells[1][at]) for at, name in enumerate(HEADERS) if 0 < at < 7]
    caches = [cache_allocated_bytes_per_token(run.config.model) for run in (one, other)]
    return [*named, ("cache, bytes/token", f"{caches[0]:,}", f"{caches[1]:,}")]


def sparklines(one: RunRecord, other: RunRecord, width: int = 40) -> list[str]:
    """A line of bars for each run's held-out bits per byte, of one scale; "" of one without any."""
    both = [run.curve.bits_per_byte.tolist() if run.curve else [] for run in (one, other)]
    low, high = min([1e9, *both[0], *both[1]]), max([0, *both[0], *both[1]])

    def bar(value: float) -> str:
        share = (value - low) / (high - low) if high > low else 0.0
        return BARS[round(share * (len(BARS) - 1))]

    lines = []
    for curve in both:
        points = [curve[round(at)] for at in _places(len(curve), width)]
        ends = f"  {curve[0]:.3f} → {curve[-1]:.3f}" if curve else ""
        lines.append("".join(map(bar, points)) + ends)
    return lines


def curves(one: RunRecord, other: RunRecord) -> Picture:
    """Both runs' training loss and held-out bits per byte over tokens."""
    with style():
        figure, [[left, right]] = panels(1, 2)
        looks = distinct([run_style(one), run_style(other)])
        for run, look in zip((one, other), looks, strict=True):
            plot = {**look.plot, "label": f"{run.path.name}: {run.label}"}
            rows = [row for row in run.rows if row.get("loss") is not None]
            tokens = [row["tokens"] for row in rows]
            left.plot(tokens, [row["loss"] for row in rows], **{**plot, "marker": ""})
            if run.curve:
                right.plot(run.curve.tokens, run.curve.bits_per_byte, **plot)
        for axis in (left, right):
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        left.set(xlabel="tokens", ylabel="training loss, nats per token")
        right.set(xlabel="tokens", ylabel="held-out bits per byte")
        legend_below(figure)
    return Picture(f"{one.path.name} and {other.path.name}", figure)


def _places(count: int, width: int) -> list[float]:
    if count <= width:
        return list(range(count))
    return [at * (count - 1) / (width - 1) for at in range(width)]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _value(value: Any) -> str:
    return value.label if isinstance(value, AttentionConfig) else str(value)


def _age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
