"""How much sooner LRKV reaches each baseline's final loss, as bars and in words."""

from __future__ import annotations

from matplotlib.axes import Axes

from lrkv_jax.artefacts.figure import empty
from lrkv_jax.artefacts.looks import look, name_of
from lrkv_jax.comparison import KINDS, Paired, Setting, against, finished, sooner_over_seeds
from lrkv_jax.comparison.sooner import SoonerOverSeeds

BASELINES = [kind for kind in KINDS if kind != "lrkv"]
FLOPS_HATCH = "////"


def sooner_bars(axis: Axes, setting: Setting) -> list[str]:
    """Two bars for each baseline, in steps and hatched in FLOPs; returns what is missing.

    Pale bars: final losses on the whole held-out split that a paired t-test over seeds does not
    tell apart (Holm for the baselines). The share itself is not tested: a first touch is never
    late, so of equal variants it is 0 or more.
    """
    axis.set_title(setting.name)
    done = {kind: finished(setting.main(kind)) for kind in KINDS}
    if not done["lrkv"]:
        gap = f"no finished run: {setting.name} lrkv"
        empty(axis, gap)
        return [gap]
    losses = {kind: {s: run.cross_entropy for s, run in done[kind].items()} for kind in KINDS}
    tests = against(losses["lrkv"], {kind: losses[kind] for kind in BASELINES if losses[kind]})
    curves = {kind: {s: run.curve for s, run in done[kind].items() if run.curve} for kind in KINDS}
    ends, gaps = [0.0], []
    for place, kind in enumerate(BASELINES):
        if done[kind]:
            over = sooner_over_seeds(curves["lrkv"], curves[kind])
            ends += _bars(axis, place, kind, over, pale=not tests[kind].differs)
            words = _in_words(over, tests[kind])
        else:
            words = f"no finished run: {setting.name} {kind}"
            gaps.append(words)
        axis.text(1.02, place, words, transform=axis.get_yaxis_transform(), va="center", fontsize=8)
    axis.axvline(0, color="black", lw=0.8)
    width = max(max(ends) - min(ends), 1.0)
    axis.set_xlim(min(ends) - 0.03 * width, max(ends) + 0.05 * width)
    axis.set_xlabel("sooner by, % of the baseline's training")
    axis.set_yticks(range(len(BASELINES)), [name_of(kind) for kind in BASELINES])
    axis.set_ylim(len(BASELINES) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    return gaps


def _bars(axis: Axes, place: int, kind: str, over: SoonerOverSeeds, *, pale: bool) -> list[float]:
    """Draws them where every seed got there; returns the values that the axis has to hold."""
    if over.steps is None:
        return []
    colour, ends = look(kind).colour, []
    for what, shift, hatch in (("steps", -0.18, ""), ("flops", 0.18, FLOPS_HATCH)):
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


def _in_words(over: SoonerOverSeeds, test: Paired) -> str:
    """What stands beside a baseline's bars."""
    if not over.each:
        return "no seed in common"
    missed, seeds = len(over.each) - over.reached, len(over.each)
    if missed:
        words = "never" if missed == seeds else f"never in {missed} of {seeds} seeds"
    else:
        words = f"{100 * over.steps.mean:.1f} % of steps\n{100 * over.flops.mean:.1f} % of FLOPs"
    if test.p is None:
        return f"{words}\n{test.verdict}"
    return words if test.differs else f"{words}\nno difference beyond noise (p = {test.p:.2g})"
