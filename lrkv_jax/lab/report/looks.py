"""How a variant looks in every picture: colour, line style and marker.

The package's lines have Okabe and Ito's colours, which colour-blind readers can distinguish; line
style and marker carry the same in greyscale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lrkv_jax.config.attention import KINDS

if TYPE_CHECKING:
    from lrkv_jax.lab.report.comparison import RunRecord


@dataclass(frozen=True)
class Look:
    """A line's colour, style and marker, and what a legend calls it."""

    colour: str
    line: str | tuple
    marker: str
    name: str

    @property
    def style(self) -> dict[str, Any]:
        """As keywords of matplotlib's `plot`."""
        return {"color": self.colour, "linestyle": self.line, "marker": self.marker}


# Of lines that bring no look of their own, in turn.
SPARES = (
    ("#F0E442", (0, (5, 1)), "h"),
    ("#882255", (0, (3, 1, 1, 1)), "p"),
    ("#44AA99", (0, (1, 1)), "*"),
    ("#332288", (0, (5, 1, 1, 1)), "<"),
)
# Of further forms of a line in one mode, in turn.
TWINS = (
    ("#332288", (0, (1, 1)), "<"),
    ("#8C564B", (0, (3, 1, 1, 1)), ">"),
    ("#BBAA00", (0, (5, 1)), "h"),
    ("#555555", (0, (5, 1, 1, 1)), "p"),
)
GREY = "#777777"  # for what is not a variant: a bound, a null, a rule
_STEPS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", ":")


def look(kind: str, mode: str | None = None) -> Look:
    """The look of a line of the family, by its name, in one of its modes; by default as published.

    The line's entry says it (`AttentionConfig.looks`); those that say nothing take spare ones.
    """
    entries = {entry.name: entry for entry in KINDS.values()}
    entry = entries.get(kind)
    published = entry.published_mode() if entry else None
    mode = mode or published
    name = kind.upper() if mode == published else f"{kind.upper()}, rope {mode}"
    if entry and mode in entry.looks:
        colour, line, marker = entry.looks[mode]
        return Look(colour, line, marker, name)
    plain = [other.name for other in entries.values() if not other.looks]
    spare = SPARES[plain.index(kind) % len(SPARES) if kind in plain else 0]
    return Look(spare[0], spare[1], spare[2], name)


def look_of(run: RunRecord) -> Look:
    """The look of a run's line, in its mode."""
    return look(run.kind, run.mode)


def name_of(kind: str) -> str:
    """What a table calls a variant."""
    return look(kind).name


def ladder(kind: str, sizes: list[int]) -> dict[int, Look]:
    """A look for each size of one kind: its colour from light to full, other lines and markers."""
    full = look(kind)
    looks = {}
    for place, size in enumerate(sorted(sizes)):
        share = 1.0 if len(sizes) == 1 else 0.4 + 0.6 * place / (len(sizes) - 1)
        looks[size] = Look(
            _lighter(full.colour, share),
            _LINES[(len(sizes) - 1 - place) % len(_LINES)],
            _STEPS[place % len(_STEPS)],
            f"{full.name}-{size}",
        )
    return looks


def apart(looks: Sequence[Look]) -> list[Look]:
    """The looks, each that an earlier one has with a colour, line and marker of no variant."""
    made: list[Look] = []
    others = 0
    for one in looks:
        if one in looks[: len(made)]:
            colour, line, marker = TWINS[others % len(TWINS)]
            made.append(Look(colour, line, marker, one.name))
            others += 1
        else:
            made.append(one)
    return made


def _lighter(colour: str, share: float) -> str:
    """The colour over white, at a share of its strength."""
    channels = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - one)):02X}" for one in channels)
