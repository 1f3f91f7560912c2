"""Tables of texts, through tabulate."""

import textwrap
from collections.abc import Sequence

from tabulate import tabulate


def tabulated(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int = 1,
    form: str = "pipe",
    widest: int | None = None,
) -> str:
    """A table of texts, its first `left` columns to the left and the others to the right.

    form: a format of tabulate; pipe is Markdown. widest: characters of a column, beyond
    which its lines are broken.
    """
    align = ["left"] * left + ["right"] * (len(headers) - left)
    if widest:  # tabulate's maxcolwidths fails on numbers like 4,096
        headers = [textwrap.fill(cell, widest - 2) for cell in headers]  # it adds two spaces
        rows = [[textwrap.fill(cell, widest) for cell in row] for row in rows]
    return tabulate(
        rows, headers, tablefmt=form, disable_numparse=True, colalign=align if rows else None
    )
