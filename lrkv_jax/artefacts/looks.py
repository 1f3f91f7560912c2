"""How a variant looks in every picture: colour, line style and marker.

Okabe and Ito's colours, which colour-blind readers tell apart; line style and marker carry the same
in greyscale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Look:
    """A line's colour, style and marker, and what a legend calls it."""

    colour: str
    line: str | tuple
    marker: str
    name: str

    @property
    def style(self) -> dict[str, str]:
        """As keywords of matplotlib's `plot`."""
        return {"color": self.colour, "linestyle": self.line, "marker": self.marker}


LOOKS = {
    "mha": Look("#000000", "-", "o", "MHA"),
    "gqa": Look("#56B4E9", "--", "s", "GQA"),
    "mqa": Look("#0072B2", ":", "v", "MQA"),
    "mla": Look("#CC79A7", "-.", "D", "MLA"),
    "lrkv full": Look("#D55E00", "-", "^", "LRKV, rope full"),
    "lrkv shared": Look("#E69F00", "--", "P", "LRKV, rope shared"),
    "lrkv latent": Look("#009E73", "-.", "X", "LRKV, rope latent"),
}
SPARE = Look("#F0E442", (0, (5, 1)), "h", "")  # of a variant that has no look of its own yet
GREY = "#777777"  # of what is no variant: a bound, a null, a rule
_STEPS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", ":")


def look(kind: str, rope: str = "full") -> Look:
    """A variant's look; LRKV's has a colour for each rope mode."""
    if kind == "lrkv":
        one = LOOKS[f"lrkv {rope}"]
        return Look(one.colour, one.line, one.marker, "LRKV") if rope == "full" else one
    return LOOKS.get(kind, replace(SPARE, name=kind.upper()))


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


def _lighter(colour: str, share: float) -> str:
    """The colour over white, at a share of its strength."""
    channels = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - one)):02X}" for one in channels)
