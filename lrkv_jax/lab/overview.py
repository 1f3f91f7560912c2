"""A run's settings, progress and cost, as texts and pictures; two runs side by side."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import statistics
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter

from lrkv_jax.config import AttentionConfig, RunConfig, load_config
from lrkv_jax.config.differences import differences
from lrkv_jax.config.frozen import ROLES, Group
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.report.comparison.runs import RunRecord
from lrkv_jax.lab.report.figures import Picture, legend_below, panels, style
from lrkv_jax.lab.report.styles import GRAY, distinct, run_style
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token, parameter_counts
from lrkv_jax.training.run_dir import is_training

HEADERS = ("run", "variant", "step", "state", "loss", "bits/byte", "tokens/s", "MB", "age")


def state_of(run: RunRecord) -> str:
    """The state of a run: finished, training, stopped, or new."""
    if run.finished:
        return "finished"
    if is_training(run.path):
        return "training"
    return "stopped" if run.rows else "new"


def row_of(run: RunRecord) -> dict[str, Any]:
    """A run's row in `lrkv runs`: nats of its last step, its last held-out bits per byte, the
    median speed of its steps, the size of its directory, and seconds since it was last written;
    of an archived run neither is known."""
    files = list(_files(run.path))
    last = run.rows[-1] if run.rows else {}
    measured = [row["validation_bpb"] for row in run.rows if row.get("validation_bpb") is not None]
    return {
        "run": str(run.path),
        "variant": run.label,
        "step": run.steps_done,
        "steps": run.config.train.total_steps,
        "state": state_of(run),
        "loss": last.get("loss"),
        "bits_per_byte": measured[-1] if measured else None,
        "tokens_per_second": run.tokens_per_second,
        "bytes": sum(file.st_size for file in files) or None,
        "age": time.time() - max(file.st_mtime for file in files) if files else None,
    }


def _files(folder: Path) -> Iterator[os.stat_result]:
    """The files below a folder; one that a training run deletes meanwhile is left out."""
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                yield path.stat()


def as_cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows as texts, under `HEADERS`; a run by its path below the folder that all are in."""
    folder = os.path.commonpath([Path(row["run"]).absolute().parent for row in rows] or [Path("/")])
    return [
        (
            os.path.relpath(row["run"], folder), row["variant"],
            f"{row['step']:,}/{row['steps']:,}", row["state"],
            _number(row["loss"], ".3f"), _number(row["bits_per_byte"], ".4f"),
            _number(row["tokens_per_second"], ",.0f"),
            _number(row["bytes"] and row["bytes"] / 1e6, ",.1f"), _age(row["age"]),
        )
        for row in rows
    ]  # fmt: skip


def setting_rows(one: RunConfig, other: RunConfig) -> list[tuple[str, str, str]]:
    """(setting, its value in one, in the other) where two configurations differ.

    Their directories, and the variants that they do not have, are left out.
    """
    changes = differences(one, other, tuple(ROLES))
    return [
        (change.key, _value(change.old), _value(change.new))
        for change in changes
        if change.key not in ("variants", "run_dir")
    ]


def result_rows(one: RunRecord, other: RunRecord) -> list[tuple[str, str, str]]:
    """(what, of one, of the other): the results of two runs, and the sizes of their caches."""
    cells = as_cells(list(map(row_of, (one, other))))
    named = [(name, cells[0][at], cells[1][at]) for at, name in enumerate(HEADERS) if 0 < at < 7]
    caches = [cache_allocated_bytes_per_token(run.config.model) for run in (one, other)]
    return [*named, ("cache, bytes/token", f"{caches[0]:,}", f"{caches[1]:,}")]


def changed_settings(config: RunConfig) -> tuple[str, list[tuple[str, str, str]]]:
    """A heading, and (setting, its value, the value under the heading) where the two differ.

    That is the value in the shipped configuration of this name, or else the default.
    """
    try:
        return f"in {config.name}", setting_rows(config, load_config(config.name))
    except LrkvError:
        return "default", list(_from_defaults(config))


def _from_defaults(group: Group, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for name, field in type(group).model_fields.items():
        value, default = getattr(group, name), field.get_default(call_default_factory=True)
        if isinstance(value, Group):
            yield from _from_defaults(value, f"{prefix}{name}.")
        elif value != default and name not in ("name", "variants", "run_dir"):
            yield prefix + name, _value(value), "" if field.is_required() else _value(default)


def about(run: RunRecord) -> Iterator[tuple[str, str]]:
    """(what, value) of what a run is."""
    model, train, data = run.config.model, run.config.train, run.config.data
    yield "variant", run.label
    kinds = f" ({model.layers_pattern or 'S'}, windows of {model.window})" if model.window else ""
    yield "model", f"{model.layers} layers{kinds}, width {model.width}, {model.heads} heads"
    yield "parameters", f"{parameter_counts(model).total:,}"
    share = run.cache_allocated_fraction
    size = f"{cache_allocated_bytes_per_token(model):,}"
    yield "KV cache, bfloat16", f"{size} bytes/token, {share:.1%} of MHA's"
    yield "data", (data.hub.repo if data.hub else data.source) if data.mixture is None else "chats"
    yield "tokenizer", data.tokenizer
    yield "batch", f"{train.global_batch_size:,} × {train.seq_len:,} tokens"
    yield "steps", f"{run.steps_done:,} of {train.total_steps:,}"
    yield "seed", str(run.seed)
    if run.rows and run.rows[-1].get("loss") is not None:
        yield "training loss", f"{run.rows[-1]['loss']:.4f} nats/token"
    if run.curve:
        loss, bits = (values[-1] for values in (run.curve.cross_entropy, run.curve.bits_per_byte))
        found = run.cross_entropy or loss, run.bits_per_byte or bits
        yield "held-out loss", "{:.4f} nats/token, {:.4f} bits/byte".format(*found)
    if run.config.init_from:
        yield "started from", str(run.config.init_from)


def cost(run: RunRecord) -> Iterator[tuple[str, str]]:
    """(what, value) of where a run was trained, and what that took; what is not known is left out.

    Seconds are those of steps: validation, samples, saves and compilation are not in them.
    """
    starts = [row for row in run.history if row["event"] == "start"]
    last = starts[-1] if starts else {}
    devices, rows = last.get("devices"), run.rows
    if last:
        count = f"{devices} × " if devices else ""
        yield "device", f"{count}{last['device']}, {last['cores']} cores, {last['dtype']}"
        mesh = run.config.mesh.model_dump()
        left = (devices or 1) // math.prod(size for size in mesh.values() if size > 0)
        sizes = {axis: left if size < 0 else size for axis, size in mesh.items()}
        if split := ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1):
            yield "mesh", split
        if "versions" in last:
            yield "versions", ", ".join(" ".join(one) for one in last["versions"].items())
        yield "started", f"{starts[0]['time'][:16].replace('T', ' ')} UTC"
        yield "starts", str(len(starts))
    seconds = sum(row.get("seconds", 0.0) for row in rows)
    if seconds:
        yield "time of steps", str(timedelta(seconds=round(seconds)))
        counts = [_devices(starts, row["step"]) for row in rows]
        if all(counts):
            used = sum(n * row.get("seconds", 0.0) for n, row in zip(counts, rows, strict=True))
            yield "device-hours", f"{used / 3600:.3g}"
    if compiled := sum(row.get("compile_seconds", 0.0) for row in rows):
        yield "compilation", f"{compiled:.0f} s"
    if rows:
        yield "tokens", f"{rows[-1]['tokens']:,}"
        yield "FLOPs", f"{rows[-1]['flops']:.3g}"
    if run.tokens_per_second:
        yield "tokens/s, median", f"{run.tokens_per_second:,.0f}"
    if found := [row["mfu"] for row in rows if row.get("mfu")]:
        yield "MFU, median", f"{statistics.median(found):.1%}"
    if memory := max((row.get("memory_bytes", 0) for row in rows), default=0):
        yield "most memory", f"{memory / 1e9:.2f} GB"


def _devices(starts: Sequence[dict[str, Any]], step: int) -> int:
    """The devices of the start that made a step; 0 where the history does not tell."""
    counts = [start.get("devices", 0) for start in starts if start["step"] < step]
    return counts[-1] if counts else 0


def samples(run: RunRecord) -> dict[str, str]:
    """The first and the newest of a run's samples, by the name of their step."""
    files = sorted((run.path / "samples").glob("step-*.txt"))
    ends = dict.fromkeys([*files[:1], *files[-1:]])
    return {
        f"step {int(path.stem[5:]):,}": path.read_text(encoding="utf-8", errors="replace")
        for path in ends
    }


def next_commands(run: RunRecord) -> list[str]:
    """Commands for a run, the likeliest first."""
    place = shlex.quote(shown_path(run.path))
    prompt = shlex.quote(next(iter(run.config.train.sample_prompts), "The"))
    say = f"chat {place}" if run.midtrained else f"generate {place} --prompt {prompt}"
    auto = any(row.get("asked_dtype") == "auto" for row in run.history)  # config.yaml has another
    resume = f"train {place}/config.yaml run_dir={place}" + " model.dtype=auto" * auto
    # An imported or converted run has a model and nothing to resume.
    given = not run.rows and (run.path / "checkpoints/0").is_dir()
    found = [resume] * (not run.finished and not given)
    if run.rows or given:
        found += [f"evaluate {place}"] * (run.evaluation is None) + [say, f"serve {place}"]
    return [f"lrkv {verb}" for verb in found]


def shown_path(path: Path) -> str:
    """A path as typed here: relative to this folder if it is below."""
    here = os.path.relpath(path)
    return str(path) if here.startswith("..") else here


# (tokens, values, keywords of matplotlib's `plot`), and a panel's title, unit and lines.
Line = tuple[np.ndarray, np.ndarray, dict[str, Any]]
Panel = tuple[str, str, list[Line]]


def curves(runs: Sequence[RunRecord]) -> list[Panel]:
    """Training loss and held-out bits per byte over tokens, of all runs.

    More than eight runs are named by their variants alone.
    """
    names = [f"{run.path.name}: {run.label}" if len(runs) < 9 else run.label for run in runs]
    first = dict(zip(reversed(names), reversed(runs), strict=True))
    looks = dict(zip(first, distinct([run_style(run) for run in first.values()]), strict=True))
    left: list[Line] = []
    right: list[Line] = []
    for name, run in zip(names, runs, strict=True):
        plot = {**looks[name].plot, "label": name}
        left.append((*smoothed(run, "loss"), {**plot, "marker": ""}))
        if run.curve:
            right.append((run.curve.tokens, run.curve.bits_per_byte, plot))
    return [("Training loss", "nats per token", left), ("Held-out loss", "bits per byte", right)]


def run_curves(run: RunRecord) -> list[Panel]:
    """Loss of training and of held-out text, learning rate and speed over tokens."""
    look = run_style(run).plot
    loss: list[Line] = [(*smoothed(run, "loss"), {"color": GRAY, "label": "training"})]
    if run.curve:
        loss.append((run.curve.tokens, run.curve.cross_entropy, {**look, "label": "held out"}))
    rates = {name: smoothed(run, name) for name in _rates(run)}
    most = ", ".join(f"{name.removeprefix('lr_')} {max(y):.3g}" for name, (_, y) in rates.items())
    share = [(x, y / max(y), {**look, "marker": "", "label": most}) for x, y in rates.values()]
    speed = [(*smoothed(run, "tokens_per_second"), {**look, "marker": ""})]
    return [
        ("Loss", "nats per token", loss),
        ("Learning rate", "share of the highest", share[:1]),  # all have one schedule
        ("Speed", "tokens per second", speed),
    ]


def drawn(title: str, shown: Sequence[Panel]) -> Picture | None:
    """A picture of the panels side by side, or None if no line has a point."""
    shown = [panel for panel in shown if any(len(tokens) for tokens, *_ in panel[2])]
    if not shown:
        return None
    with style():
        figure, [axes] = panels(1, len(shown))
        for axis, (name, unit, lines) in zip(axes, shown, strict=True):
            for tokens, values, plot in lines:
                axis.plot(tokens, values, **plot)
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            axis.set(xlabel="tokens", ylabel=unit, title=name if len(shown) > 1 else "")
        legend_below(figure)
    return Picture(title, figure)


def _rates(run: RunRecord) -> list[str]:
    """The learning rates that rows have, and that are not always 0."""
    first = run.rows[0] if run.rows else {}
    return [key for key in first if key.startswith("lr_") and any(row[key] for row in run.rows)]


def smoothed(run: RunRecord, name: str, points: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and a number of a run's rows, as means over equal parts; empty without any."""
    rows = [(row["tokens"], row[name]) for row in run.rows if row.get(name) is not None]
    parts = np.array_split(np.asarray(rows, np.float64).reshape(-1, 2), min(points, len(rows)) or 1)
    means = np.stack([part.mean(0) for part in parts]) if rows else np.empty((0, 2))
    return means[:, 0], means[:, 1]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _value(value: Any) -> str:
    return value.label if isinstance(value, AttentionConfig) else str(value)


def _age(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
