"""The style of a variant in every picture: color, line style and marker.

The package's variants have Okabe and Ito's colors, which color-blind readers can
distinguish; line style and marker carry the same in grayscale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from lrkv_jax.config.attention import AttentionConfig, variants

if TYPE_CHECKING:
    from lrkv_jax.lab.report.comparison.runs import RunRecord


@dataclass(frozen=True)
class VariantStyle:
    """A variant's color, line style and marker."""

    color: str
    line: str | tuple
    marker: str

    @property
    def plot(self) -> dict[str, Any]:
        """The style as keywords of matplotlib's `plot`."""
        return {"color": self.color, "linestyle": self.line, "marker": self.marker}


@dataclass(frozen=True)
class StyledVariant:
    """A variant's runs by seed, with the label and the style that pictures give it."""

    label: str
    style: VariantStyle
    runs: Mapping[int, RunRecord]

    @property
    def kind(self) -> str:
        return next(iter(self.runs.values())).kind

    @classmethod
    def styled(cls, labeled: Mapping[str, Mapping[int, RunRecord]]) -> list[Self]:
        """The variants of {label: runs by seed} that have runs, in styles that differ."""
        labeled = {label: runs for label, runs in labeled.items() if runs}
        styles = distinct([run_style(next(iter(runs.values()))) for runs in labeled.values()])
        return [
            cls(label, style, runs)
            for (label, runs), style in zip(labeled.items(), styles, strict=True)
        ]


# Styles for variants without one, in this order.
SPARES = (
    VariantStyle("#F0E442", (0, (5, 1)), "h"),
    VariantStyle("#999933", (0, (3, 1, 1, 1)), "p"),
    VariantStyle("#44AA99", (0, (1, 1)), "*"),
    VariantStyle("#332288", (0, (5, 1, 1, 1)), "<"),
)
_SPARE_OF: dict[str, VariantStyle] = {}
GRAY = "#777777"  # for what is not a variant: a bound, a null, a rule
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", ":")


def variant_style(kind: str, mode: str | None = None) -> VariantStyle:
    """The style of a variant by its name, in one of its modes; by default as published."""
    return _style(variants().get(kind), kind, mode)


def run_style(run: RunRecord) -> VariantStyle:
    """The style of a run's variant, in its mode."""
    return _style(type(run.config.model.attention), run.kind, run.mode)


def _style(variant: type[AttentionConfig] | None, kind: str, mode: str | None) -> VariantStyle:
    """The settings class's style (`AttentionConfig.styles`), or a spare one, always the same."""
    mode = mode or (variant.published_mode() if variant else None)
    if variant and mode in variant.styles:
        return VariantStyle(*variant.styles[mode])
    return _SPARE_OF.setdefault(kind, SPARES[len(_SPARE_OF) % len(SPARES)])


def distinct(styles: Sequence[VariantStyle]) -> list[VariantStyle]:
    """The styles; equal ones become a ladder from light to full, with other lines and markers."""
    made = []
    for place, style in enumerate(styles):
        count, step = styles.count(style), styles[:place].count(style)
        if count == 1:
            made.append(style)
            continue
        color = _lighter(style.color, 0.4 + 0.6 * step / (count - 1))
        line, marker = _LINES[(count - 1 - step) % len(_LINES)], _MARKERS[step % len(_MARKERS)]
        made.append(VariantStyle(color, line, marker))
    return made


def _lighter(color: str, share: float) -> str:
    """The color over white, at a share of its strength."""
    channels = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - one)):02X}" for one in channels)
