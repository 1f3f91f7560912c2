"""Figure 3: loss against cache, and how much sooner LRKV reaches each baseline's final loss.

(a) Bits per byte against the share of MHA's cache. (b) 1 − step*/step_final for each baseline, in
steps and in training FLOPs as they are executed: step* is where LRKV's curve of the same seed first
comes down to the baseline's last validation, linear between validations.
"""

import textwrap

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, legend_below, panels
from lrkv_jax.artefacts.looks import GREY, look_of, name_of
from lrkv_jax.artefacts.losses import CACHE_LABEL, CACHE_NOTE, against_cache, looks_beside
from lrkv_jax.artefacts.printed import printed
from lrkv_jax.comparison import (
    Contrast,
    RunRecord,
    Setting,
    against,
    finished,
    settings,
    sooner_over_seeds,
)
from lrkv_jax.comparison.sooner import SoonerOverSeeds

HATCH = "////"  # of bars in FLOPs
TITLE_WIDTH = 34  # characters of a line over a panel, or beside its bars
CAPTION = (
    "Share of the baseline's training not needed; means over seeds, whiskers one standard "
    "deviation, dots seeds. Pale bars: the final losses themselves, on the whole held-out "
    "split, are not significantly different (seeds as blocks, p adjusted by Holm for the "
    "baselines, p ≥ 0.05). A curve's first touch of a loss can only be early: this share is 0 or "
    "more even between equal variants, so it is not tested itself. Learning rates are as the "
    "schedule has them at that step, not decayed to its end. The paper prints {} % of steps at "
    "2.5B."
)


@artefact("Figure 3", "Training efficiency")
def fig03_training_efficiency(runs):
    shown = [setting for setting in settings(runs) if any(run.finished for run in setting.runs)]
    titles = ("Bits per byte against cache", "How much sooner LRKV reaches a baseline's final loss")
    if not shown:
        gaps = ["no finished run: any scale"]
        return [Picture(title, None, gaps=gaps, name="b"[:at]) for at, title in enumerate(titles)]
    return [_trade_off(shown, titles[0]), _efficiency(shown, titles[1])]


def _trade_off(shown, title):
    figure, axes = panels(1, len(shown))
    gaps = []
    for axis, (name, lines) in zip(axes[0], looks_beside(shown).items(), strict=True):
        axis.set_title(name)
        axis.set_xlabel(CACHE_LABEL)
        axis.set_ylabel("held-out bits/byte")
        for label, look, by_seed in lines:
            if runs := finished(by_seed):
                against_cache(axis, look, [runs], "bits_per_byte")
            else:
                gaps.append(f"no finished run: {name} {label}")
        axis.set_xlim(left=0)
    legend_below(figure)
    return Picture(title, figure, CACHE_NOTE, gaps=gaps)


def _efficiency(shown, title):
    gaps = [f"no finished run: {one.name} lrkv" for one in shown if not _lrkv(one)]
    shown = [one for one in shown if _lrkv(one)]
    if not shown:
        return Picture(title, None, gaps=gaps, name="b")
    figure, axes = panels(1, len(shown), panel=(5.2, 3.4))
    for axis, setting in zip(axes[0], shown, strict=True):
        gaps += _sooner_bars(axis, setting)
    figure.legend(
        handles=[
            Patch(facecolor=GREY, edgecolor=GREY, label="in steps"),
            Patch(facecolor="white", edgecolor=GREY, hatch=HATCH, label="in FLOPs"),
        ],
        loc="outside lower center", ncols=2,
    )  # fmt: skip
    paper = printed("fig03", "sooner", "text")
    return Picture(title, figure, CAPTION.format(paper.text), gaps=gaps, name="b")


def _lrkv(setting: Setting) -> dict[int, RunRecord]:
    """The finished runs by seed of the LRKV that stands for a setting; {} without one.

    That is its main line. Of several lines of which none is, it is the one with the most finished
    runs, the published form before others.
    """
    if main := finished(setting.main("lrkv")):
        return main
    lines = [finished(runs) for runs in setting.beside.values()]
    own = [runs for runs in lines if runs and next(iter(runs.values())).kind == "lrkv"]
    return max(own, key=lambda runs: (len(runs), not _form(runs)), default={})


def _form(runs: dict[int, RunRecord]) -> str:
    return next(iter(runs.values())).config.model.attention.form


def _sooner_bars(axis: Axes, setting: Setting) -> list[str]:
    """Draw two bars for each baseline, in steps and hatched in FLOPs; returns what is missing.

    A pale bar's final losses do not differ significantly (`CAPTION`).
    """
    kinds = setting.kinds
    baselines = [kind for kind in kinds if kind != "lrkv"]
    done = {kind: finished(setting.main(kind)) for kind in baselines} | {"lrkv": _lrkv(setting)}
    name = f"{setting.name}, {next(iter(done['lrkv'].values())).label}"
    axis.set_title(textwrap.fill(name, TITLE_WIDTH))
    losses = {kind: {s: run.cross_entropy for s, run in done[kind].items()} for kind in done}
    tests = against(losses["lrkv"], {kind: losses[kind] for kind in baselines if losses[kind]})
    curves = {kind: {s: run.curve for s, run in done[kind].items() if run.curve} for kind in done}
    ends, gaps = [0.0], []
    for place, kind in enumerate(baselines):
        if done[kind]:
            over = sooner_over_seeds(curves["lrkv"], curves[kind])
            colour = look_of(next(iter(done[kind].values()))).colour
            ends += _bars(axis, place, colour, over, pale=not tests[kind].differs)
            words = _in_words(over, tests[kind])
        else:
            gaps.append(f"no finished run: {setting.name} {kind}")
            words = textwrap.fill(gaps[-1], TITLE_WIDTH)
        axis.text(1.02, place, words, transform=axis.get_yaxis_transform(), va="center", fontsize=8)
    axis.axvline(0, color="black", lw=0.8)
    width = max(max(ends) - min(ends), 1.0)
    axis.set_xlim(min(ends) - 0.03 * width, max(ends) + 0.05 * width)
    axis.set_xlabel("sooner by, % of the baseline's training")
    axis.set_yticks(range(len(baselines)), [name_of(kind) for kind in baselines])
    axis.set_ylim(len(baselines) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    return gaps


def _bars(axis: Axes, place: int, colour: str, over: SoonerOverSeeds, *, pale: bool) -> list[float]:
    """Draw them where every seed got there; returns the values that the axis has to hold."""
    if over.steps is None:
        return []
    ends = []
    for what, shift, hatch in (("steps", -0.18, ""), ("flops", 0.18, HATCH)):
        share = getattr(over, what)
        each = [100 * getattr(one, what) for one in over.each.values()]
        axis.barh(
            place + shift, 100 * share.mean, 0.34, color="white" if hatch else colour,
            edgecolor=colour, hatch=hatch, alpha=0.35 if pale else 1.0,
            xerr=None if share.sd is None else 100 * share.sd, capsize=3,
        )  # fmt: skip
        if len(each) > 1:
            axis.plot(each, [place + shift] * len(each), "o", ms=3, mfc="white", mec="black")
        ends += [*each, 100 * (share.mean - (share.sd or 0)), 100 * (share.mean + (share.sd or 0))]
    return ends


def _in_words(over: SoonerOverSeeds, test: Contrast) -> str:
    """Return what stands beside a baseline's bars."""
    if not over.each:
        return "no seed in common"
    missed, seeds = len(over.each) - over.reached, len(over.each)
    if missed:
        words = "never" if missed == seeds else f"never in {missed} of {seeds} seeds"
    else:
        words = f"{100 * over.steps.mean:.1f} % of steps\n{100 * over.flops.mean:.1f} % of FLOPs"
    if test.p is None:
        return f"{words}\n{test.verdict}"
    return words if test.differs else f"{words}\nno significant difference (p = {test.p:.2g})"
