"""A benchmark's report: which variants are compared, where it was measured, and its files."""

import datetime
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jaxlib

import lrkv_jax
from lrkv_jax import files
from lrkv_jax.config import ModelConfig, RunConfig, load_config
from lrkv_jax.distributed.hardware import device_name, usable_cores
from lrkv_jax.errors import LrkvError

MEASURED, SKIPPED, WRONG, FAILED = "measured", "skipped", "wrong", "failed"

# Takes (activity, done, all).
Progress = Callable[..., None]


def silent(*_: Any) -> None:
    """A `Progress` that shows nothing."""


def check_settings(settings: Any, *names: str) -> None:
    """Raise `LrkvError` for an empty list among these fields, and for no samples."""
    for name in names:
        if getattr(settings, name) == ():
            raise LrkvError(f"{name}: nothing is listed, so there is nothing to measure")
    if settings.samples < 1:
        raise LrkvError("samples: use 1 or more")


def variants_of(
    scale: str,
    variants: Sequence[str] | None = None,
    *,
    depth: int | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, RunConfig]:
    """The chosen variants of a scale, all unless given, cut to `depth` layers if given.

    Raises `LrkvError` as `load_config` does, and for a depth that cuts a pattern of layers.
    """
    names = load_config(scale, overrides).variants if variants is None else variants
    found = {name: load_config(scale, [f"attention={name}", *overrides]) for name in names}
    if depth is not None:
        found = {name: _cut(config, depth) for name, config in found.items()}
    return found


def _cut(config: RunConfig, depth: int) -> RunConfig:
    # As many layers of the scan unrolled as divide the fewer ones.
    changes = {"layers": depth, "unroll": math.gcd(config.model.unroll, depth)}
    cut = ModelConfig.model_validate(config.model.model_dump() | changes)
    return config.model_copy(update={"model": cut})


def compare_with_mha(rows: Sequence[Any], **over: str) -> None:
    """Fill in each measured row's fields over those of the fastest MHA at its `shape`.

    `over` names fields that receive a ratio, and the field that each is of: as `time_over_mha`,
    the time by which MHA is the fastest.
    """
    measured = [row for row in rows if row.status == MEASURED]
    best: dict[tuple, Any] = {}
    for row in measured:
        if row.variant == "mha":
            fastest = best.setdefault(row.shape, row)
            best[row.shape] = min(fastest, row, key=attrgetter(over["time_over_mha"]))
    for row in measured:
        if row.shape in best:
            for ratio, of in over.items():
                setattr(row, ratio, getattr(row, of) / getattr(best[row.shape], of))


def skip_unless_it_fits(rows: Sequence[Any], need: int, limit: int) -> bool:
    """Whether `need` bytes are within the limit; if not, the rows are marked as skipped."""
    if need <= limit:
        return True
    for row in rows:
        row.status = SKIPPED
        row.reason = (
            f"{need / 1e9:.1f} GB needed at once, {limit / 1e9:.1f} GB to be had: fewer variants, "
            "layers or sequences would fit"
        )
    return False


def put_down(row: Any, error: Exception) -> None:
    """Write an error into a row: an `LrkvError` skips it, anything else is a failure."""
    if isinstance(error, LrkvError):
        row.status, row.reason = SKIPPED, str(error)
        return
    first = (str(error).splitlines() or [""])[0]
    row.status, row.reason = FAILED, f"{type(error).__name__}: {first}"[:200]


def machine() -> dict[str, Any]:
    """The circumstances: device, versions, date, command, and how busy the machine was."""
    program = Path(sys.argv[0]).name
    return {
        "backend": jax.default_backend(),
        "device": device_name(),
        "cores": usable_cores(),
        "load_average": os.getloadavg()[0],
        "versions": {
            "lrkv_jax": lrkv_jax.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["lrkv" if program == "__main__.py" else program, *sys.argv[1:]]),
    }


def where(report: dict[str, Any]) -> str:
    """The machine, the number format and the date, in words."""
    return (
        f"{report['device']} ({report['backend']}, {report['cores']} cores, "
        f"load {report['load_average']:.1f}), {report['settings']['dtype']}, "
        f"jax {report['versions']['jax']}, {report['date'][:10]}"
    )


def reasons(rows: Sequence[Any]) -> list[str]:
    """One line for each thing that kept rows from being measured, however many."""
    unmeasured = [row for row in rows if row.status != MEASURED]
    names: dict[str, list[str]] = {}
    for row in unmeasured:
        names.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    return [f"- {', '.join(dict.fromkeys(who))}: {why}" for why, who in names.items()]


def median(value: float, first: float, third: float) -> str:
    """A median, and half the distance between its quartiles as a share of it."""
    return f"{number(value)} ±{50 * (third - first) / value:.0f} %"


def number(value: float) -> str:
    """A time or a size with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def ratio(value: float | None) -> str:
    """A ratio, or nothing."""
    return "" if value is None else f"{value:.2f}"


def as_json(report: dict[str, Any]) -> dict[str, Any]:
    """The report with its rows as plain dictionaries."""
    return {**report, "rows": [asdict(row) for row in report["rows"]]}


def command(
    run: Callable[[Any, Progress], dict[str, Any]],
    settings: Any,
    tables: Callable[[dict[str, Any]], str],
    shown: AbstractContextManager[Progress],
    *,
    print_json: bool,
    out: str | Path | None,
) -> None:
    """Run a benchmark while `shown`: tables or JSON on stdout, a file in the folder `out`."""
    if out is not None:  # what cannot be made is known before the work
        Path(out).mkdir(parents=True, exist_ok=True)
    with shown as progress:
        report = run(settings, progress)
    print(files.json_of(as_json(report)) if print_json else tables(report))
    if out is not None:
        print(save(report, out), file=sys.stderr)


def save(report: dict[str, Any], folder: str | Path) -> Path:
    """Write BENCHMARK_BACKEND.json."""
    path = Path(folder) / f"{report['benchmark']}_{report['backend']}.json"
    files.write_json(path, as_json(report))
    return path
