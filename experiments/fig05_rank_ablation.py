"""Figure 5: what LRKV's rank and MLA's latent buy.

    python experiments/fig05_rank_ablation.py RUN... --out DIR

(a) held-out cross-entropy against the cache, for every rank, latent and baseline of a scale;
(b) LRKV's curves by rank. Shown are scales with two ranks or two latents.
"""

from lrkv_jax.artefacts import (
    CACHE_LABEL,
    CACHE_NOTE,
    Artefact,
    Line,
    Picture,
    against_cache,
    command,
    curves,
    empty,
    ladder,
    legend_below,
    look,
    panels,
)
from lrkv_jax.comparison import KINDS, finished, settings

ABLATED = ("mla", "lrkv")  # by latent and by rank
GAP = "two ranks or two latents of any scale"


def make(runs):
    shown = [one for one in settings(runs) if any(len(sizes(one, kind)) > 1 for kind in ABLATED)]
    return [losses(shown), by_rank(shown)]


def sizes(setting, kind):
    """A kind's runs by size and then seed; of LRKV, those with its keys rotated in full."""
    runs = [
        run for run in setting.runs
        if run.kind == kind and getattr(run.config.model.attention, "rope", "full") == "full"
    ]  # fmt: skip
    return {size: {run.seed: run for run in runs if run.size == size}
            for size in sorted({run.size for run in runs}, key=lambda size: size or 0)}  # fmt: skip


def losses(shown):
    figure, axes = panels(1, max(1, len(shown)), panel=(5.0, 3.6))
    gaps = [] if shown else [f"no run: {GAP}"]
    for axis, setting in zip(axes[0], shown, strict=False):
        axis.set_title(f"{setting.name}; numbers: MLA's latent, LRKV's rank")
        axis.set_xlabel(CACHE_LABEL)
        axis.set_ylabel("held-out cross-entropy, nats/token")
        for kind in KINDS:
            done = {}
            for size, runs in sizes(setting, kind).items():
                done[size] = finished(runs)
                if not done[size]:
                    gaps.append(f"not finished: {setting.name} {kind} {size}")
                    del done[size]
            if not done:
                gaps.append(f"no finished run: {setting.name} {kind}")
                continue
            marks = [str(size) for size in done] if kind in ABLATED else ()
            against_cache(
                axis, look(kind), list(done.values()), "cross_entropy",
                marks=marks, above=kind == "mla",
            )  # fmt: skip
        axis.set_xlim(0, 1.05 * axis.get_xlim()[1])
    if not shown:
        empty(axes[0][0], gaps[0])
    legend_below(figure)
    return Picture(
        "Loss against cache, by rank and latent", figure,
        "Means over seeds on the whole held-out split, at the end of training; bars: one standard "
        f"deviation. {CACHE_NOTE}",
        gaps=gaps,
    )  # fmt: skip


def by_rank(shown):
    columns = {}
    for setting in shown:
        ranks = sizes(setting, "lrkv")
        if len(ranks) < 2:
            continue
        lines = {"mha": Line(look("mha"), setting.main("mha"), f"{setting.name} mha")}
        for rank, one in ladder("lrkv", list(ranks)).items():
            lines[f"lrkv {rank}"] = Line(one, ranks[rank], f"{setting.name} lrkv {rank}")
        columns[setting.name] = lines
    return curves("Loss by rank", columns, baseline="mha", gap="two ranks of any scale", name="b")


ARTEFACT = Artefact("fig05_rank_ablation", "Ablation of rank and latent", "Figure 5", make)

if __name__ == "__main__":
    command(ARTEFACT)
