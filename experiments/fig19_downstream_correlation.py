"""Figure 19: whether bits per byte after pretraining tell the combined score of five benchmarks.

    python experiments/fig19_downstream_correlation.py RUN... --out DIR

Runs that were evaluated on all five benchmarks; a midtrained one stands at the bits per byte of the
run it was started from, which is read from `init_from` where it is not among RUN. A point is a
variant, the mean over its seeds.
"""

from collections import defaultdict

from lrkv_jax.artefacts import (
    SCALES,
    Artefact,
    Picture,
    command,
    correlated,
    empty,
    legend_below,
    name_of,
    panels,
    printed,
)
from lrkv_jax.comparison import KINDS, pretraining, settings
from lrkv_jax.errors import LrkvError

INTERVAL = (
    "R² of the variants' means; its 95 % interval by Fisher's z: of five points it spans most of "
    "what there is."
)


def make(runs):
    return [measured(runs), as_printed()]


def measured(runs):
    groups, gaps = defaultdict(lambda: defaultdict(list)), []
    known = {run.path.resolve(): run for run in runs}
    for midtrained in (False, True):
        for setting in settings(runs, midtrained=midtrained):
            title = f"{setting.name}{', midtrained' if midtrained else ''}"
            for run in setting.runs:
                if (run.evaluation or {}).get("combined") is None:
                    continue
                try:
                    point = pretraining(run, known).bits_per_byte, 100 * run.evaluation["combined"]
                    groups[title][run.kind, run.label].append(point)
                except LrkvError as error:
                    gaps.append(str(error))
    figure, axes = panels(1, max(1, len(groups)))
    for axis, (title, variants) in zip(axes[0], groups.items(), strict=False):
        points = [(*which, *zip(*each, strict=True)) for which, each in variants.items()]
        if correlated(axis, title, points) is None:
            gaps.append(f"fewer than 3 variants to correlate: {title}")
    if not groups:
        gaps.append("no run evaluated on all five benchmarks")
        empty(axes[0][0], gaps[-1])
    legend_below(figure)
    return Picture(
        "Combined score against bits per byte after pretraining", figure,
        f"Means over seeds, bars one standard deviation. {INTERVAL}", gaps=gaps,
    )  # fmt: skip


def as_printed():
    """The paper's own points, at the scales that it prints both of."""
    shown = {}
    for scale, name in SCALES.items():
        bpb = {kind: printed("table01", "bpb", scale, kind) for kind in KINDS}
        score = {kind: printed("table02", scale, kind, "combined") for kind in KINDS}
        if all(bpb.values()) and all(score.values()):
            shown[f"paper, printed: {name}"] = [
                (kind, name_of(kind), [bpb[kind].value], [score[kind].value]) for kind in KINDS
            ]
    figure, axes = panels(1, len(shown))
    for axis, (title, points) in zip(axes[0], shown.items(), strict=True):
        correlated(axis, title, points)
    legend_below(figure)
    claimed = printed("fig19", "r_squared")
    return Picture(
        "The paper's values, printed", figure,
        f"R² recomputed from Tables 1 and 2; the paper prints {claimed.text} for 2.5B and none for "
        f"the other scales. {INTERVAL}",
        name="printed",
    )  # fmt: skip


ARTEFACT = Artefact(
    "fig19_downstream_correlation", "Bits per byte against benchmark scores", "Figure 19", make
)

if __name__ == "__main__":
    command(ARTEFACT)
