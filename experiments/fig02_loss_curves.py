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
    figure, axes = panels(1, max(1, len(shown)))
    gaps = [draw(axis, setting) for axis, setting in zip(axes[0], shown, strict=False)]
    if not shown:
        empty(axes[0][0], "no run: any scale")
        gaps = [["no run: any scale"]]
    legend_below(figure)
    return Picture(
        "Held-out loss during pretraining", figure,
        "Lines: means over seeds; bands: one standard deviation. Upper axis: training FLOPs of "
        "MHA, 6·(N − lookup) + 12·L·H·K·T a token.",
        gaps=[gap for some in gaps for gap in some],
    )  # fmt: skip


def draw(axis, setting):
    gaps, scale = [], None
    for kind in KINDS:
        curves = [run.curve for run in setting.main(kind).values() if run.curve]
        if not curves:
            gaps.append(f"no run: {setting.name} {kind}")
            continue
        points = min(len(curve.steps) for curve in curves)  # a run may still be going
        losses = np.stack([curve.cross_entropy[:points] for curve in curves])
        tokens, mean = curves[0].tokens[:points], losses.mean(0)
        one = look(kind)
        axis.plot(tokens, mean, label=one.name, markevery=0.15, **one.style)
        if len(curves) > 1:
            sd = losses.std(0, ddof=1)
            axis.fill_between(tokens, mean - sd, mean + sd, color=one.colour, alpha=0.15, lw=0)
        if kind == "mha":
            scale = curves[0].flops[-1] / curves[0].tokens[-1]
    axis.set_title(setting.name)
    axis.xaxis.set_major_formatter(EngFormatter())
    axis.set_xlabel("training tokens")
    axis.set_ylabel("held-out cross-entropy, nats/token")
    if scale:
        above = axis.secondary_xaxis("top", (lambda t: t * scale, lambda f: f / scale))
        above.set_xlabel("training FLOPs (MHA)")
        above.xaxis.set_major_formatter(EngFormatter())
        above.xaxis.set_major_locator(MaxNLocator(5))
    return gaps


ARTEFACT = Artefact("fig02_loss_curves", "Held-out loss during pretraining", "Figure 2", make)

if __name__ == "__main__":
    command(ARTEFACT)
