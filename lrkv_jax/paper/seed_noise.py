"""Beside the paper: the differences between variants against the spread of seeds.

A row for each variant and each size of a scale: held-out bits per byte less MHA's, seed by seed,
with the mean and its 95 % interval. The band is the standard deviation of MHA over its seeds.
"""

from matplotlib.patches import Patch

from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, panels
from lrkv_jax.artefacts.looks import GREY, look_of
from lrkv_jax.comparison import against, finished, settings, spread


@artefact("Beside the paper", "Differences between variants and the spread of seeds")
def seed_noise(runs):
    shown, gaps = [], []
    for setting in settings(runs):
        done = {label: finished(setting.seeds(label)) for label in setting.labels}
        done = {label: by_seed for label, by_seed in done.items() if by_seed}
        if "MHA" in done and len(done) > 1:
            shown.append((setting, done))
        else:
            gaps.append(f"no finished run of MHA and another: {setting.name}")
    title = "Differences between variants against the spread of seeds"
    if not shown:
        gaps = gaps or ["no finished run of MHA and another: any scale"]
        return Picture(title, None, gaps=gaps)
    rows = max(len(done) for _, done in shown)
    figure, axes = panels(1, len(shown), panel=(5.2, 0.6 + 0.32 * rows))
    for axis, (setting, done) in zip(axes[0], shown, strict=True):
        _draw(axis, setting, done)
    figure.legend(
        handles=[Patch(color=GREY, alpha=0.25, label="± 1 standard deviation of MHA over seeds")],
        loc="outside lower center",
    )  # fmt: skip
    return Picture(
        title, figure,
        "Bits per byte on the whole held-out split at the end of training, less MHA's of the same "
        "seed: dots are seeds, the marker their mean, the bar its 95 % interval (one model "
        "of variant and seed, each row alone). In words: the same test with p adjusted by Holm for "
        "the number of rows, and what would have been found where nothing is.",
        gaps=gaps,
    )  # fmt: skip


def _draw(axis, setting, done):
    bpb = {label: {s: run.bits_per_byte for s, run in runs.items()} for label, runs in done.items()}
    mha = bpb.pop("MHA")
    noise = spread(list(mha.values())).sd
    if noise is not None:
        axis.axvspan(-noise, noise, color=GREY, alpha=0.25, lw=0)
    axis.axvline(0, color="black", lw=0.8)
    for place, (label, test) in enumerate(against(mha, bpb).items()):
        run = next(iter(done[label].values()))
        one = look_of(run)
        each = [bpb[label][seed] - mha[seed] for seed in sorted(bpb[label].keys() & mha.keys())]
        axis.plot(each, [place] * len(each), "o", ms=3, mfc="white", mec="black", zorder=3)
        if each:
            bar = [[test.difference - test.interval[0]]] * 2 if test.interval else None
            axis.errorbar(
                test.difference, place, xerr=bar, capsize=3, color=one.colour, marker=one.marker
            )
        axis.text(
            1.02, place, test.in_words, va="center", fontsize=8,
            transform=axis.get_yaxis_transform(),
        )  # fmt: skip
    axis.text(1.02, -0.9, "difference:", fontsize=8, transform=axis.get_yaxis_transform())
    axis.set_title(setting.name)
    axis.set_yticks(range(len(bpb)), list(bpb))
    axis.set_ylim(len(bpb) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("difference to MHA, bits/byte (better to the left)")
