"""Held-out loss over training, over the cache and by rank: Figures 2 to 5."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, MaxNLocator

from lrkv_jax.lab.report.comparison.contrasts import Contrast, against, mean_and_sd
from lrkv_jax.lab.report.comparison.runs import (
    Curve,
    RunRecord,
    Setting,
    finished,
    settings,
    steps_saved_by_seed,
)
from lrkv_jax.lab.report.figures import Picture, draw_mean, legend_below, panels
from lrkv_jax.lab.report.paper import report_item
from lrkv_jax.lab.report.paper.pretraining import at_long_context
from lrkv_jax.lab.report.paper_values import paper_value
from lrkv_jax.lab.report.styles import StyledVariant, run_style, variant_style
from lrkv_jax.models.accounting.counts import cache_bytes_fraction

CURVES_NOTE = (
    "Above: means over seeds. Below: differences to MHA of the same seed; bands are one standard "
    "deviation. Upper axis: MHA's training FLOPs, 6·(N − lookup) + 12·L·H·K·T per token. All "
    "held-out losses of a column are of the same text."
)
CACHE_LABEL = "KV cache, % of MHA's bytes"
CACHE_NOTE = (
    "Means over seeds on the whole held-out split, at the end of training; bars: one standard "
    "deviation. Cache share: by the formula, of a bfloat16 cache with LRKV's float32 inverse norms "
    "and MLA's rope key, which the paper's shares leave out."
)


def _variants(setting: Setting) -> list[StyledVariant]:
    """The variants that are compared, named without their sizes, as scales share a legend."""
    beside = setting.beside.values()
    return StyledVariant.styled({next(iter(runs.values())).form: runs for runs in beside})


def _curves_by_seed(variant: StyledVariant) -> dict[int, Curve]:
    """Curves by seed of the finished runs; of running ones where none is finished.

    A run that has just begun would cut the others' mean short.
    """
    done = finished(variant.runs) or variant.runs
    return {seed: run.curve for seed, run in done.items() if run.curve}


@report_item("Figure 2", "Held-out loss during pretraining")
def fig02_loss_curves(runs):
    """Held-out cross-entropy against training tokens, with a column for each scale."""
    return _curves("Held-out loss during pretraining", settings(runs))


@report_item("Figure 4", "Held-out loss at a long context")
def fig04_long_context_curves(runs):
    """Figure 2 of models trained at a context of 8,192 tokens or more, as those of 512m_8k."""
    return _curves("Held-out loss at a long context", at_long_context(runs))


def _curves(title: str, shown: Sequence[Setting]) -> list[Picture]:
    columns = {one.name: _variants(one) for one in shown if any(run.curve for run in one.runs)}
    return _draw_curves(title, columns)


def _draw_curves(
    title: str, columns: Mapping[str, Sequence[StyledVariant]], name: str = ""
) -> list[Picture]:
    """A column of two panels for each setting: losses, and differences to MHA's of the same seed.

    What variants differ by is a hundredth of what training changes.
    """
    if not columns:
        return []
    figure, axes = panels(2, len(columns), sharex="col", panel=(4.2, 2.9))
    for above, below, (setting, variants) in zip(*axes, columns.items(), strict=True):
        above.set_title(setting)
        above.set_ylabel("cross-entropy,\nnats/token")
        below.set_ylabel("difference to MHA,\nnats/token")
        below.set_xlabel("training tokens")
        below.xaxis.set_major_formatter(EngFormatter())
        curves = {variant.label: _curves_by_seed(variant) for variant in variants}
        reference = curves.get("MHA", {})
        for variant in variants:
            of_seeds = curves[variant.label]
            losses = [(one.tokens, one.cross_entropy) for one in of_seeds.values()]
            _draw_line(above, variant, losses)
            _draw_line(below, variant, _differences(of_seeds, reference))
        if reference:
            _flops_axis(above, next(iter(reference.values())))
        else:
            below.text(0.5, 0.5, "no MHA run", transform=below.transAxes, ha="center")
    legend_below(figure)
    return [Picture(title, figure, CURVES_NOTE, name=name)]


def _differences(
    curves: Mapping[int, Curve], reference: Mapping[int, Curve]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens, and each seed's losses less the reference's of the same text there."""
    found = []
    for seed, curve in curves.items():
        other = reference.get(seed)
        if other and other.heldout_tokens == curve.heldout_tokens:
            tokens, ours, theirs = np.intersect1d(curve.tokens, other.tokens, return_indices=True)
            found.append((tokens, curve.cross_entropy[ours] - other.cross_entropy[theirs]))
    return found


def _draw_line(
    axis: Axes, variant: StyledVariant, seeds: Sequence[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Draw the mean over seeds, and its band, at the tokens where all seeds have a value."""
    if seeds:
        tokens = reduce(np.intersect1d, [at for at, _ in seeds])
        every = None if len(tokens) <= 12 else 0.15  # few points are marked each
        shared = [values[np.isin(at, tokens)] for at, values in seeds]
        look = variant.style.plot
        draw_mean(axis, tokens, shared, label=variant.label, markevery=every, **look)


def _flops_axis(axis: Axes, curve: Curve) -> None:
    flops = curve.flops[-1] / curve.tokens[-1]
    top = axis.secondary_xaxis("top", (lambda t: t * flops, lambda f: f / flops))
    top.set_xlabel("training FLOPs (MHA)")
    top.xaxis.set_major_formatter(EngFormatter())
    top.xaxis.set_major_locator(MaxNLocator(5))


@report_item("Figure 3", "Training efficiency")
def fig03_training_efficiency(runs):
    """Loss against cache, and how much earlier LRKV reaches each baseline's final loss."""
    shown = [setting for setting in settings(runs) if any(run.finished for run in setting.runs)]
    return [*_trade_off(shown), *_efficiency(shown)]


def _trade_off(shown: Sequence[Setting]) -> list[Picture]:
    if not shown:
        return []
    figure, axes = panels(1, len(shown))
    for axis, setting in zip(axes[0], shown, strict=True):
        axis.set_title(setting.name)
        axis.set_xlabel(CACHE_LABEL)
        axis.set_ylabel("held-out bits/byte")
        for variant in _variants(setting):
            look = variant.style.plot | {"label": variant.label}
            _draw_over_cache(axis, look, [finished(variant.runs)], "bits_per_byte")
        axis.set_xlim(left=0)
    legend_below(figure)
    return [Picture("Bits per byte against cache", figure, CACHE_NOTE)]


def _efficiency(shown: Sequence[Setting]) -> list[Picture]:
    shown = [setting for setting in shown if finished(setting.main("lrkv"))]
    if not shown:
        return []
    figure, axes = panels(1, len(shown), panel=(5.2, 3.4))
    for axis, setting in zip(axes[0], shown, strict=True):
        _saving_bars(axis, setting)
    claim = paper_value("fig03", "sooner", "text")
    return [
        Picture(
            "How much sooner LRKV reaches a baseline's final loss", figure,
            "Share of the baseline's training steps that LRKV did not need; means over seeds, "
            "whiskers one standard deviation; FLOPs by the published count. A curve's first touch "
            "of a loss can only be early: the share is 0 or more even between equal variants, so "
            "it is the final losses that are tested (p by Holm). The paper prints "
            f"{claim.text} % of steps at 2.5B.",
            name="b",
        )
    ]  # fmt: skip


def _saving_bars(axis: Axes, setting: Setting) -> None:
    """Draw a bar for each baseline, with its numbers and whether the final losses differ."""
    done = {kind: finished(setting.main(kind)) for kind in setting.kinds}
    done = {kind: runs for kind, runs in done.items() if runs}
    losses = {kind: {s: run.cross_entropy for s, run in done[kind].items()} for kind in done}
    curves = {kind: {s: run.curve for s, run in done[kind].items() if run.curve} for kind in done}
    baselines = [kind for kind in done if kind != "lrkv"]
    tests = against(losses["lrkv"], {kind: losses[kind] for kind in baselines})
    for place, kind in enumerate(baselines):
        saved = steps_saved_by_seed(curves["lrkv"], curves[kind])
        words = f"{_saved_in_words(saved, curves['lrkv'], curves[kind])}{_tested(tests[kind])}"
        if saved and None not in saved.values():
            mean, sd = mean_and_sd(saved.values())
            axis.barh(
                place, 100 * mean, 0.6, xerr=100 * (sd or 0.0), capsize=3,
                color=run_style(next(iter(done[kind].values()))).color,
            )  # fmt: skip
        axis.text(1.02, place, words, transform=axis.get_yaxis_transform(), va="center", fontsize=8)
    axis.axvline(0, color="black", lw=0.8)
    axis.set_title(f"{setting.name}\n{next(iter(done['lrkv'].values())).label}")
    axis.set_xlabel("sooner by, % of the baseline's steps")
    axis.set_yticks(range(len(baselines)), [kind.upper() for kind in baselines])
    axis.set_ylim(len(baselines) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)


def _saved_in_words(
    saved: Mapping[int, float | None], curves: Mapping[int, Curve], baselines: Mapping[int, Curve]
) -> str:
    """The text next to a baseline's bar: the means in steps and in FLOPs."""
    if not saved:
        return "no seed in common"
    missed = list(saved.values()).count(None)
    if missed:
        return "never" if missed == len(saved) else f"never in {missed} of {len(saved)} seeds"
    steps = mean_and_sd(saved.values())[0]
    ours, theirs = (next(iter(one.values())) for one in (curves, baselines))
    cost = (ours.flops[-1] / ours.tokens[-1]) / (theirs.flops[-1] / theirs.tokens[-1])
    return f"{100 * steps:.1f} % of steps\n{100 * (1 - (1 - steps) * cost):.1f} % of FLOPs"


def _tested(test: Contrast) -> str:
    """A line for final losses that do not differ, or cannot be tested."""
    if test.p is None:
        return f"\n{test.verdict}"
    return "" if test.differs else f"\nno significant difference (p = {test.p:.2g})"


ABLATED = ("mla", "lrkv")  # by latent and by rank


@report_item("Figure 5", "Ablation of rank and latent")
def fig05_rank_ablation(runs):
    """Loss against cache by LRKV's rank and MLA's latent, and LRKV's curves by rank."""
    shown = [one for one in settings(runs) if any(len(_sizes(one, kind)) > 1 for kind in ABLATED)]
    return [*_losses(shown), *_by_rank(shown)]


def _sizes(setting: Setting, kind: str) -> dict[str, dict[int, RunRecord]]:
    """A kind's runs in its published mode, by size as its label has it and then seed."""
    found: dict[str, dict[int, RunRecord]] = {}
    for run in sorted(setting.runs, key=lambda run: run.size or 0):
        if run.form == kind.upper():
            found.setdefault(run.config.model.attention.sized, {})[run.seed] = run
    return found


def _losses(shown: Sequence[Setting]) -> list[Picture]:
    if not shown:
        return []
    figure, axes = panels(1, len(shown), panel=(5.0, 3.6))
    for axis, setting in zip(axes[0], shown, strict=True):
        axis.set_title(f"{setting.name}; numbers: MLA's latent, LRKV's rank")
        axis.set_xlabel(CACHE_LABEL)
        axis.set_ylabel("held-out cross-entropy, nats/token")
        for kind in setting.kinds:
            sizes = _sizes(setting, kind)
            marks = list(sizes) if kind in ABLATED else []
            points = list(map(finished, sizes.values()))
            look = variant_style(kind).plot | {"label": kind.upper()}
            _draw_over_cache(axis, look, points, "cross_entropy", marks)
        axis.set_xlim(0, 1.05 * axis.get_xlim()[1])
    legend_below(figure)
    return [Picture("Loss against cache, by rank and latent", figure, CACHE_NOTE)]


def _by_rank(shown: Sequence[Setting]) -> list[Picture]:
    columns = {}
    for setting in shown:
        ranks = _sizes(setting, "lrkv")
        if len(ranks) > 1:
            labeled = {f"LRKV-{rank}": runs for rank, runs in ranks.items()}
            columns[setting.name] = StyledVariant.styled({"MHA": setting.main("mha"), **labeled})
    return _draw_curves("Loss by rank", columns, name="b")


def _draw_over_cache(
    axis: Axes,
    look: dict[str, Any],
    points: Sequence[Mapping[int, RunRecord]],
    loss: str,
    marks: Sequence[str] = (),
) -> None:
    """Draw points of finished runs by seed: the mean of their `loss` (an attribute of `RunRecord`).

    Error bars are one standard deviation over seeds; several points are joined from the
    smallest cache to the largest. `marks` are written next to the points.
    """
    found = []
    for place, runs in enumerate(points):
        if runs:
            mean, sd = mean_and_sd(getattr(run, loss) for run in runs.values())
            share = 100 * cache_bytes_fraction(next(iter(runs.values())).config.model)
            found.append((share, mean, sd, marks[place] if marks else ""))
    if not found:
        return
    found.sort(key=lambda one: one[0])
    shares, means, sds, _ = zip(*found, strict=True)
    bars = None if set(sds) == {None} else [sd or 0.0 for sd in sds]
    line = {} if len(found) > 1 else {"linestyle": "none"}
    axis.errorbar(shares, means, yerr=bars, capsize=3, **look | line)
    axis.margins(y=0.15)  # room for the marks
    for share, mean, _, mark in found:
        axis.annotate(
            mark, (share, mean), xytext=(4, 4), textcoords="offset points", fontsize=7,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )  # fmt: skip
