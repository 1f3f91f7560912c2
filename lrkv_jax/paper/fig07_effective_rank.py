"""Figures 7 and 9: effective rank of heads, uncentred and centred, as bars.

Each bar is a mean over layers and seeds, beside random weights and under the cap.
"""

from lrkv_jax.artefacts.analysed import FORMS, MEANS, Group, cap, pictures
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, legend_below, panels

TITLE = "Effective rank of heads"


@artefact("Figures 7 and 9", TITLE, reads="analyses")
def fig07_effective_rank(runs):
    return pictures(runs, TITLE, _picture)


def _picture(group: Group) -> Picture:
    """A bar for each variant beside its random-weights null, under the cap."""
    names = [line.label.replace(" rope", "\nrope") for line in group.every]
    width = max(3.2, 0.85 * len(names) + 0.7)
    # One below the other: beside one another they would be too wide for a page.
    figure, axes = panels(len(FORMS) * len(MEANS), panel=(width, 2.4))
    shown = [(form, centring) for form in FORMS for centring in MEANS]
    for [axis], (form, centring) in zip(axes, shown, strict=True):
        _bars(axis, group, form, centring)
        axis.set_title(f"{FORMS[form]}, {MEANS[centring]}")
        axis.set_xticks(range(len(names)), names, fontsize=8)
        axis.tick_params(axis="x", length=0)
        axis.grid(axis="x", visible=False)
        axis.set_ylabel(f"rank, of {group.heads} heads")
    legend_below(figure)
    return Picture(
        TITLE, figure,
        "exp of the entropy of the Gram matrix's eigenvalues, mean over layers; the error bar is "
        f"one standard deviation over seeds. {group.seeds} Above each bar: % of "
        f"H = {group.heads} heads, the paper's convention, and % of the cap: heads less their mean "
        f"span {group.heads - 1} dimensions at most.",
    )  # fmt: skip


def _bars(axis, group: Group, form: str, centring: str) -> None:
    most = cap(group, centring)
    for x, line in enumerate(group.every):
        mean, sd = line.over_seeds(lambda a: a[form]["mean"][centring]["effective_rank"])
        axis.bar(x - 0.12, mean, 0.5, yerr=sd, color=line.look.colour, capsize=3, ecolor="black")
        null = line.first[form]["null"]
        axis.bar(
            x + 0.26, null["mean"][centring]["effective_rank"], 0.18,
            yerr=null["sd_of_mean"][centring]["effective_rank"], facecolor="white",
            edgecolor="black", hatch="/////", lw=0.7, label="random weights (null)",
        )  # fmt: skip
        text = f"{100 * mean / group.heads:.1f} % of H"
        if most not in (0, group.heads):
            text += f"\n{100 * mean / most:.1f} % of cap"
        axis.text(x, most + 0.02 * group.heads, text, ha="center", va="bottom", fontsize=6.5)
    axis.axhline(most, color="black", lw=1.0, ls="--", label="cap")
    axis.set_ylim(0, group.heads * 1.22)
    axis.set_xlim(-0.6, len(group.every) - 0.4)
