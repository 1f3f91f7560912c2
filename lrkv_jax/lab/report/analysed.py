"""Analysed runs: which are compared, how each line of them looks, and what is missing.

Everything is read from `analysis.json` (`lrkv_jax.lab.analysis.analyse`).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lrkv_jax.lab.report.comparison import RunRecord, Setting, every_setting
from lrkv_jax.lab.report.figure import Picture, draw_mean, mean_and_sd
from lrkv_jax.lab.report.looks import Look, apart, ladder, look, look_of, name_of
from lrkv_jax.lab.report.table import Column, Row, Table

FORMS = {"query_key": "query–key forms", "value_output": "value–output forms"}
FAMILIES = {"key": "keys", "value": "values"}
MEANS = {"uncentred": "uncentred", "centred": "centred (PCA)"}
TEXTLESS = "analysed without text: lrkv analyze RUN --batches 4"


@dataclass(frozen=True)
class Line:
    """One label's analysed runs by seed, as in MLA-128, and its look."""

    label: str
    kind: str
    look: Look
    runs: Mapping[int, RunRecord]

    def each(self, value: Callable[..., Any]) -> dict[int, Any]:
        """A value of each seed's analysis."""
        return {seed: value(run.analysis) for seed, run in self.runs.items()}

    def over_seeds(self, value: Callable[..., Any]) -> tuple[np.ndarray, np.ndarray | None]:
        """Mean and sample standard deviation of an array; None of one seed."""
        return mean_and_sd(self.each(value).values())

    @property
    def first(self) -> dict[str, Any]:
        """The lowest seed's."""
        return self.runs[min(self.runs)].analysis


@dataclass(frozen=True)
class Group:
    """The analysed runs of one setting.

    `lines` are those that stand beside one another (`Setting.beside`), or all of a kind that has no
    such run; `every` has all, an ablation's too. `gaps` name what is not there.
    """

    name: str
    lines: list[Line]
    every: list[Line]
    gaps: list[str]

    @property
    def layers(self) -> int:
        return self.every[0].first["layers"]

    @property
    def heads(self) -> int:
        return self.every[0].first["heads"]

    @property
    def depths(self) -> dict[str, int]:
        """An early, a middle and a late layer, by name; fewer where there are fewer."""
        names = {1: ["only"], 2: ["early", "late"]}.get(self.layers, ["early", "middle", "late"])
        places = sorted({0, self.layers // 2, self.layers - 1})
        return dict(zip(names, places, strict=True))

    def depth_title(self, depth: str) -> str:
        return f"{depth}: layer {self.depths[depth] + 1} of {self.layers}"

    def of(self, kind: str, *, every: bool = False) -> list[Line]:
        """Its lines of a kind."""
        return [one for one in (self.every if every else self.lines) if one.kind == kind]

    @property
    def seeds(self) -> str:
        """How many seeds the means are over, in words."""
        counts = {one.label: len(one.runs) for one in self.every}
        if len(set(counts.values())) > 1:
            return "Seeds: " + ", ".join(f"{name} {n}" for name, n in counts.items()) + "."
        (n,) = set(counts.values())
        return "One seed." if n == 1 else f"Means over {n} seeds."


def cap(group: Group, centring: str) -> int:
    """The largest possible effective rank: heads less their mean span a dimension less."""
    return group.heads if centring == "uncentred" else group.heads - 1


def groups(runs: Sequence[RunRecord]) -> tuple[list[Group], list[str]]:
    """Return the settings that have analysed runs, and the gaps of those that have none."""
    found, gaps = [], []
    for setting in every_setting(runs):
        group = _group(setting)
        if group.every:
            found.append(group)
        else:
            gaps += [gap for gap in group.gaps if gap.startswith("not analysed")]
    return found, gaps


def _group(setting: Setting) -> Group:
    gaps, every, main = [], {}, set()
    for kind in setting.kinds:
        if not setting.main(kind):
            gaps.append(f"no run: {setting.name} {name_of(kind)}")
        main |= {run.label for run in setting.main(kind).values() if run.analysis}
    for label in setting.labels:
        of_label = setting.seeds(label)
        seeds = [seed for seed, run in of_label.items() if not run.analysis]
        if seeds:
            named = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
            gaps.append(f"not analysed: {setting.name} {label}, {named}: lrkv analyze RUN")
        gaps += [
            f"analysed at step {run.analysis['step']} of {run.steps_done}: {setting.name} {label}, "
            f"seed {seed}: lrkv analyze RUN"
            for seed, run in of_label.items()
            if run.analysis and run.steps_done and run.analysis["step"] != run.steps_done
        ]
        if len(seeds) < len(of_label):
            every[label] = {seed: run for seed, run in of_label.items() if run.analysis}
    kinds = {label: next(iter(of_seed.values())).kind for label, of_seed in every.items()}
    stands = {kinds[label] for label in main}
    beside = setting.beside
    shown = [label for label in every if label in beside or kinds[label] not in stands]
    return Group(setting.name, list(_lines(every, shown)), list(_lines(every, list(every))), gaps)


def _lines(every: Mapping[str, Mapping[int, RunRecord]], labels: Sequence[str]) -> Iterable[Line]:
    one_of = {label: next(iter(every[label].values())) for label in labels}
    sizes: dict[str, list[int]] = {}
    for run in one_of.values():
        if run.size is not None and look_of(run) == look(run.kind):
            sizes.setdefault(run.kind, []).append(run.size)
    looks = []
    for run in one_of.values():
        own = sizes.get(run.kind, [])
        many = len(own) > 1 and look_of(run) == look(run.kind)
        looks.append(ladder(run.kind, own)[run.size] if many else look_of(run))
    for (label, run), own_look in zip(one_of.items(), apart(looks), strict=True):
        yield Line(label, run.kind, own_look, every[label])


def headline(runs: Sequence[RunRecord]) -> Table:
    """One row for each analysed run: how different its heads are, and what random weights give."""
    columns = [Column(name) for name in (
        "run", "uncentred", "centred", "90 % of variance in", "mean cosine",
    )]  # fmt: skip
    rows = []
    for run in runs:
        if run.analysis:
            forms = run.analysis["query_key"]
            mean, null = forms["mean"], forms["null"]["mean"]
            ranks = (
                f"{_number(mean[view]['percent_of_cap'])} ({_number(null[view]['percent_of_cap'])})"
                for view in MEANS
            )
            components = mean["centred"]["components_90"]
            rows.append(
                Row.of(
                    run.path.name, *ranks, f"{components:.1f} of {run.analysis['heads'] - 1}",
                    _number(mean["mean_off_diagonal"], "+.3f"),
                )
            )  # fmt: skip
    return Table(
        "Effective rank of the heads' query-key forms, means over layers", columns, rows,
        caption="% of the cap, H uncentred and H − 1 centred; in brackets, random weights.",
    )  # fmt: skip


def _number(value: float | None, written: str = ".1f") -> str:
    """A model of one head has no pairs of heads, and no dimension once their mean is taken out."""
    return "none" if value is None else format(value, written)


def pictures(
    runs: Sequence[RunRecord], title: str, draw: Callable[[Group], Picture | Iterable[Picture]]
) -> list[Picture]:
    """What `draw` makes of each setting, named after it; one empty picture if none is analysed."""
    found, missing = groups(runs)
    if not found:
        return [Picture(title, None, gaps=missing or ["no run: any scale"])]
    made = []
    for group in found:
        drawn = draw(group)
        for one in [drawn] if isinstance(drawn, Picture) else drawn:
            one.title = f"{one.title}, {group.name}"
            one.gaps = list(dict.fromkeys([*group.gaps, *one.gaps]))
            names = (group.name if len(found) > 1 else "", one.name)
            one.name = "_".join(_slug(name) for name in names if name)
            made.append(one)
    made[0].gaps += missing
    return made


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-")


def draw_line(
    axis: Axes,
    x: Sequence[float] | np.ndarray,
    line: Line,
    value: Callable[..., Any],
    *,
    log: bool = False,
    **style: Any,
) -> None:
    """Draw a line's mean over seeds with a band of one standard deviation."""
    mean, sd = line.over_seeds(value)
    usual = line.look.style | {"label": line.label, "markevery": max(1, len(mean) // 12)}
    draw_mean(axis, x, mean, sd, log=log, **usual | style)


def layer_axis(axis: Axes, layers: int, *, label: bool = True) -> np.ndarray:
    """Number the layers from 1; returns their places."""
    axis.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    axis.set_xlim(1 - 0.02 * layers, layers + 0.02 * layers)
    if label:
        axis.set_xlabel("layer")
    return np.arange(1, layers + 1)
