"""From `attention=mha,lrkv seed=0,1,2` to the runs of that grid."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from lrkv_jax.config import RunConfig, load_config
from lrkv_jax.config.differences import SEEDS
from lrkv_jax.errors import LrkvError


@dataclass(frozen=True)
class Point:
    """One run of a grid: its name in the sweep's folder, and its configuration, `run_dir` set.

    `arguments` are those of `lrkv train`.
    """

    name: str
    config: RunConfig
    arguments: tuple[str, ...]

    @property
    def directory(self) -> Path:
        return Path(self.config.directory)


def grid(config: str, settings: Sequence[str], out: str | None = None) -> list[Point]:
    """The runs of every combination of the settings' values; a later setting varies faster.

    A setting is KEY=VALUE as `lrkv train` takes it, or KEY=VALUE,VALUE,... for several; commas in
    brackets and quotes do not separate. `seed` sets the seeds of parameters and data together, and
    `attention=all` is every variant of the file. Runs are put into `out` (runs/NAME unless given).

    Raises `LrkvError` for a setting that is none, given twice or with one value twice, for what
    `load_config` refuses in any of the runs, and for two runs that would have one name.
    """
    axes = _axes(config, settings)
    several = [key for key, values in axes.items() if len(values) > 1]
    points: dict[str, Point] = {}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        overrides = [f"{key}={value}" for key, value in chosen.items() if key != "seed"]
        overrides += [f"{key}={chosen['seed']}" for key in SEEDS if "seed" in chosen]
        run = load_config(config, overrides)
        name = _name(run.attention, {key: chosen[key] for key in several})
        if name in points:
            raise LrkvError(f"two runs of the sweep would be called {name}: change one setting")
        directory = str(Path(out or f"runs/{run.name}") / name)
        run = run.model_copy(update={"run_dir": directory})
        points[name] = Point(name, run, (config, *overrides, f"run_dir={directory}"))
    return list(points.values())


def _axes(config: str, settings: Sequence[str]) -> dict[str, list[str]]:
    axes: dict[str, list[str]] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key or not text.strip():
            raise LrkvError(f"{setting!r} is not a setting: write key=value or key=value,value")
        if key == "run_dir":
            raise LrkvError("each run of a sweep has its own directory: use --out FOLDER")
        values = _split(text)
        if key in axes or len(set(values)) < len(values):
            raise LrkvError(f"{setting} repeats itself: give each key and each value once")
        axes[key] = values
    twice = [key for key in SEEDS if key in axes and "seed" in axes]
    if twice:
        raise LrkvError(f"seed sets {twice[0]} too: give one of them")
    if axes.get("attention") == ["all"]:
        axes["attention"] = list(load_config(config).variants)
    return axes


def _split(text: str) -> list[str]:
    """The items of a YAML list that is written without its brackets, each as it is written."""
    try:
        items = yaml.compose(f"[{text}]").value
    except (yaml.YAMLError, ValueError, RecursionError):
        raise LrkvError(f"{text} is not YAML: quote what has brackets or signs") from None
    return [text[item.start_mark.index - 1 : item.end_mark.index - 1] for item in items]


def _name(variant: str, chosen: dict[str, str]) -> str:
    """A name like `lrkv-rank16-seed0`: the variant, then what varies, the seed last."""
    rest = sorted((k for k in chosen if k != "attention"), key=lambda key: key == "seed")
    parts = [key.rpartition(".")[2] + chosen[key] for key in rest]
    return re.sub(r"[^\w.+-]+", "_", "-".join([variant, *parts]))
