"""Figure 3: loss against cache, and how much sooner LRKV reaches each baseline's final loss.

    python experiments/fig03_training_efficiency.py RUN... --out DIR

(a) bits per byte against the share of MHA's cache. (b) 1 − step*/step_final for each baseline, in
steps and in training FLOPs: step* is where LRKV's curve of the same seed first comes down to the
baseline's last validation, linear between validations.
"""

from matplotlib.patches import Patch

from lrkv_jax.artefacts import (
    CACHE_LABEL,
    CACHE_NOTE,
    GREY,
    Artefact,
    Picture,
    against_cache,
    command,
    empty,
    legend_below,
    look,
    panels,
    printed,
    sooner_bars,
)
from lrkv_jax.comparison import KINDS, finished, settings


def make(runs):
    shown = [setting for setting in settings(runs) if any(run.finished for run in setting.runs)]
    return [trade_off(shown), efficiency(shown)]


def trade_off(shown):
    figure, axes = panels(1, max(1, len(shown)))
    gaps = [] if shown else ["no finished run: any scale"]
    for axis, setting in zip(axes[0], shown, strict=False):
        axis.set_title(setting.name)
        axis.set_xlabel(CACHE_LABEL)
        axis.set_ylabel("held-out bits/byte")
        for kind in KINDS:
            if runs := finished(setting.main(kind)):
                against_cache(axis, look(kind), [runs], "bits_per_byte")
            else:
                gaps.append(f"no finished run: {setting.name} {kind}")
        axis.set_xlim(left=0)
    if not shown:
        empty(axes[0][0], gaps[0])
    legend_below(figure)
    return Picture(
        "Bits per byte against cache", figure,
        "Means over seeds on the whole held-out split, at the end of training; bars: one standard "
        f"deviation. {CACHE_NOTE}",
        gaps=gaps,
    )  # fmt: skip


def efficiency(shown):
    figure, axes = panels(1, max(1, len(shown)), panel=(5.2, 3.4))
    gaps = [] if shown else ["no finished run: any scale"]
    for axis, setting in zip(axes[0], shown, strict=False):
        gaps += sooner_bars(axis, setting)
    if not shown:
        empty(axes[0][0], gaps[0])
    figure.legend(
        handles=[
            Patch(facecolor=GREY, edgecolor=GREY, label="in steps"),
            Patch(facecolor="white", edgecolor=GREY, hatch="////", label="in FLOPs"),
        ],
        loc="outside lower center", ncols=2,
    )  # fmt: skip
    paper = printed("fig03", "sooner", "text")
    return Picture(
        "How much sooner LRKV reaches a baseline's final loss", figure,
        "Share of the baseline's training not needed; means over seeds, whiskers one standard "
        "deviation, dots seeds. Pale bars: the final losses themselves, on the whole held-out "
        "split, are not told apart (paired t-test over seeds, Holm for the baselines, p ≥ 0.05). "
        "A first touch of a curve's end is never late: of equal variants this share is 0 or more, "
        "so it is not tested itself. Learning rates are as the schedule has them at that step, not "
        f"decayed to its end. The paper prints {paper.text} % of steps at 2.5B.",
        gaps=gaps, name="b",
    )  # fmt: skip


ARTEFACT = Artefact("fig03_training_efficiency", "Training efficiency", "Figure 3", make)

if __name__ == "__main__":
    command(ARTEFACT)
