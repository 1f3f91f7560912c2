"""Figure 8: Frobenius norms of keys and values by layer.

MHA's, and LRKV's shared part, residual and total; the paper says 3.1 to 6.7 times MHA's in one
place and 4 to 5 in another.
"""

from typing import Any

import numpy as np

from lrkv_jax.artefacts.analysed import FAMILIES, Group, draw_line, layer_axis, pictures
from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.figure import Picture, legend_below, panels
from lrkv_jax.artefacts.printed import printed

TITLE = "Norms of keys and values"
# LRKV's parts, which also differ without their colours.
PARTS: dict[str, dict[str, Any]] = {
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
    figure, axes = panels(max(1, len(ours)), len(FAMILIES))
    ratios = []
    for row, line in zip(axes, ours or [None], strict=True):
        row[0].set_ylabel("Frobenius norm,\nmean over heads")
        for axis, (family, name) in zip(row, FAMILIES.items(), strict=True):
            places = layer_axis(axis, group.layers)
            for other in theirs:
                draw_line(axis, places, other, _norms(family, "total"), label="MHA ‖W_h‖")
            parts = line.first["magnitude"]["per_layer"][0][family] if line else {}
            for part, style in PARTS.items():
                if parts.get(part) is not None:
                    of_part = _norms(family, part)
                    draw_line(axis, places, line, of_part, label=_PART_NAMES[part], **style)
            axis.set_ylim(bottom=0)  # after all lines: it keeps the top as it is
            axis.set_title(f"{line.label}, {name}" if line else name)
            if line and theirs:
                total, of_mha = (
                    each.over_seeds(_norms(family, "total"))[0] for each in (line, theirs[0])
                )
                times = _times(total / of_mha)
                axis.set_title(f"{line.label}\n{name}: total {times} MHA's")
                ratios.append(f"{line.label}, {name} {times}")
    legend_below(figure, 4)
    claim = printed("heads", "key_norm", "results"), printed("heads", "key_norm", "discussion")
    against = "LRKV's total over MHA's, by layer: " if ratios else ""
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
