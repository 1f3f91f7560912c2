"""Figure 2: held-out cross-entropy against training tokens, and against training FLOPs.

    python experiments/fig02_loss_curves.py RUN... --out DIR

A panel for each scale; lines are means over seeds, bands one standard deviation. The upper axis is
MHA's FLOPs: other variants' tokens cost up to some per cent more or less.
"""

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator

from lrkv_jax.artefacts import Artefact, Picture, command, empty, legend_below, look, panels
from lrkv_jax.comparison import KINDS, settings


def make(runs):
    shown = [setting for setting in settings(runs) if any(run.curve for run in setting.runs)]
    figure, axes = panels(2, max(1, len(shown)), sharex="col", panel=(4.2, 2.9))
    gaps = [gap for column, one in zip(zip(*axes, strict=True), shown, strict=False)
            for gap in draw(column, one)]  # fmt: skip
    if not shown:
        gaps = ["no run: any scale"]
        for (axis,) in axes:
            empty(axis, gaps[0])
    legend_below(figure)
    return Picture(
        "Held-out loss during pretraining", figure,
        "Above: means over seeds. Below: the same over MHA's of the same seed; bands are one "
        "standard deviation. Upper axis: training FLOPs of MHA, 6·(N − lookup) + 12·L·H·K·T a "
        "token.",
        gaps=gaps,
    )  # fmt: skip


def draw(axes, setting):
    above, below = axes
    curves = {kind: drawn(setting.main(kind)) for kind in KINDS}
    for kind in KINDS:
        line(above, kind, [(curve, curve.cross_entropy) for curve in curves[kind].values()])
        pairs = [(c, curves["mha"][s]) for s, c in curves[kind].items() if s in curves["mha"]]
        line(below, kind, [(curve, over(curve, mha)) for curve, mha in pairs])
    above.set_title(setting.name)
    above.set_ylabel("held-out cross-entropy,\nnats/token")
    below.set_ylabel("over MHA's, nats/token")
    below.set_xlabel("training tokens")
    below.xaxis.set_major_formatter(EngFormatter())
    if curves["mha"]:
        mha = next(iter(curves["mha"].values()))
        flops = mha.flops[-1] / mha.tokens[-1]
        top = above.secondary_xaxis("top", (lambda t: t * flops, lambda f: f / flops))
        top.set_xlabel("training FLOPs (MHA)")
        top.xaxis.set_major_formatter(EngFormatter())
        top.xaxis.set_major_locator(MaxNLocator(5))
    return [f"no run: {setting.name} {kind}" for kind in KINDS if not curves[kind]]


def drawn(runs):
    """Curves by seed: of the finished runs, and of the running ones where none is finished."""
    done = {seed: run for seed, run in runs.items() if run.finished}
    return {seed: run.curve for seed, run in (done or runs).items() if run.curve}


def over(curve, mha):
    points = min(len(mha.steps), len(curve.steps))
    return curve.cross_entropy[:points] - mha.cross_entropy[:points]


def line(axis, kind, seeds):
    """The mean over seeds as far as all of them are, and its band."""
    if not seeds:
        return
    points = min(len(values) for _, values in seeds)
    tokens = seeds[0][0].tokens[:points]
    values = np.stack([values[:points] for _, values in seeds])
    one, mean = look(kind), values.mean(0)
    axis.plot(tokens, mean, label=one.name, markevery=0.15, **one.style)
    if len(values) > 1:
        sd = values.std(0, ddof=1)
        axis.fill_between(tokens, mean - sd, mean + sd, color=one.colour, alpha=0.15, lw=0)


ARTEFACT = Artefact("fig02_loss_curves", "Held-out loss during pretraining", "Figure 2", make)

if __name__ == "__main__":
    command(ARTEFACT)
