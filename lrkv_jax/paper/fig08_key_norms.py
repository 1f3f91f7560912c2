"""Figure 8: Frobenius norms of keys and values by layer.

MHA's, and LRKV's shared part, residual and total; the paper says 3.1 to 6.7 times MHA's in one
place and 4 to 5 in another.
"""

import numpy as np

from lrkv_jax.artefacts.analysed import FAMILIES, Group, draw_line, layer_axis, pictures
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, legend_below, panels
from lrkv_jax.artefacts.printed import printed

TITLE = "Norms of keys and values"
# LRKV's parts, which also differ without their colours.
PARTS = {
    "shared": {"color": "#E69F00", "linestyle": "--", "marker": "s"},
    "residual": {"color": "#009E73", "linestyle": ":", "marker": "v"},
    "total": {"color": "#D55E00", "linestyle": "-", "marker": "^"},
}
_PART_NAMES = {
    "shared": "‖W_shared‖",
    "residual": "‖U_h B_hᵀ‖",
    "total": "‖W_shared + U_h B_hᵀ‖",
}


@artefact("Figure 8", TITLE, reads="analyses")
def fig08_key_norms(runs):
    return pictures(runs, TITLE, _picture)


def _picture(group: Group) -> Picture:
    ours, theirs = group.of("lrkv"), group.of("mha")
    gaps = [f"no analysed run: {group.name} {name}"
            for name, lines in (("LRKV", ours), ("MHA", theirs)) if not lines]  # fmt: skip
    if len(gaps) == 2:
        return Picture(TITLE, None, gaps=gaps)
    figure, axes = panels(1, len(FAMILIES))
    ratios = []
    for axis, (family, name) in zip(axes[0], FAMILIES.items(), strict=True):
        places = layer_axis(axis, group.layers)
        for line in theirs:
            draw_line(axis, places, line, _norms(family, "total"), label=f"{line.label} ‖W_h‖")
        for line in ours:
            for part, style in PARTS.items():
                if line.first["magnitude"]["per_layer"][0][family][part] is not None:
                    label = f"{line.label} {_PART_NAMES[part]}"
                    draw_line(axis, places, line, _norms(family, part), label=label, **style)
        axis.set_title(name)
        axis.set_ylim(bottom=0)
        if ours and theirs:
            total, of_mha = (
                line.over_seeds(_norms(family, "total"))[0] for line in (ours[-1], theirs[0])
            )
            axis.set_title(f"{name}: {ours[-1].label}'s total {_times(total / of_mha)} MHA's")
            ratios.append(f"{name} {_times(total / of_mha)}")
    axes[0][0].set_ylabel("Frobenius norm, mean over heads")
    legend_below(figure, 4)
    claim = printed("heads", "key_norm", "results"), printed("heads", "key_norm", "discussion")
    against = f"{ours[-1].label}'s total over MHA's, by layer: " if ratios else ""
    return Picture(
        TITLE, figure,
        f"{against}{'; '.join(ratios)}{'. ' if ratios else ''}The paper says of keys "
        f"{claim[0].text}× in its results and {claim[1].text}× in its discussion. QK-norm hides "
        f"the norm of a key from its logits; nothing hides a value's. {group.seeds}",
        gaps=gaps,
    )  # fmt: skip


def _norms(family, part):
    return lambda a: [layer[family][part] for layer in a["magnitude"]["per_layer"]]


def _times(ratios: np.ndarray) -> str:
    return f"{ratios.min():.2f} to {ratios.max():.2f}×"
