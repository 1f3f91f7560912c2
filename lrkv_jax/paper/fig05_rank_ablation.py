"""Figure 5: what LRKV's rank and MLA's latent buy.

(a) Held-out cross-entropy against the cache, for every rank, latent and baseline of a scale;
(b) LRKV's curves by rank. Scales with two ranks or two latents are shown.
"""

from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, legend_below, panels
from lrkv_jax.artefacts.looks import ladder, look, look_of
from lrkv_jax.artefacts.losses import CACHE_LABEL, CACHE_NOTE, CurveLine, against_cache, curves
from lrkv_jax.comparison import finished, settings

ABLATED = ("mla", "lrkv")  # by latent and by rank
GAP = "two ranks or two latents of any scale"


@artefact("Figure 5", "Ablation of rank and latent")
def fig05_rank_ablation(runs):
    shown = [one for one in settings(runs) if any(len(_sizes(one, kind)) > 1 for kind in ABLATED)]
    return [_losses(shown), _by_rank(shown)]


def _sizes(setting, kind):
    """A kind's runs by size and then seed; of LRKV, those with its keys rotated in full."""
    runs = [run for run in setting.runs if run.kind == kind and look_of(run) == look(kind)]
    return {size: {run.seed: run for run in runs if run.size == size}
            for size in sorted({run.size for run in runs}, key=lambda size: size or 0)}  # fmt: skip


def _losses(shown):
    title = "Loss against cache, by rank and latent"
    if not shown:
        return Picture(title, None, gaps=[f"no run: {GAP}"])
    figure, axes = panels(1, len(shown), panel=(5.0, 3.6))
    gaps = []
    for axis, setting in zip(axes[0], shown, strict=True):
        axis.set_title(f"{setting.name}; numbers: MLA's latent, LRKV's rank")
        axis.set_xlabel(CACHE_LABEL)
        axis.set_ylabel("held-out cross-entropy, nats/token")
        for kind in setting.kinds:
            done = {}
            for size, runs in _sizes(setting, kind).items():
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
    legend_below(figure)
    return Picture(title, figure, CACHE_NOTE, gaps=gaps)


def _by_rank(shown):
    columns = {}
    for setting in shown:
        ranks = _sizes(setting, "lrkv")
        if len(ranks) < 2:
            continue
        lines = {"mha": CurveLine(look("mha"), setting.main("mha"), f"{setting.name} mha")}
        for rank, one in ladder("lrkv", list(ranks)).items():
            lines[f"lrkv {rank}"] = CurveLine(one, ranks[rank], f"{setting.name} lrkv {rank}")
        columns[setting.name] = lines
    return curves("Loss by rank", columns, baseline="mha", gap="two ranks of any scale", name="b")
