"""Addresses take turns: however much one of them asks for, another's text is not behind all of it.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), with a text as the unit.
"""

from __future__ import annotations

from collections import Counter

# The most of what is open that one address may have.
SHARE = 0.75


class FairQueue:
    """What each address has open, and the turn of its next text.

    An address's texts have ascending turns, one apart; its first comes after what is being decoded.
    So one address alone is served in the order of its requests, and several are served in turn.
    """

    def __init__(self) -> None:
        self.completions: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._last: dict[str, int] = {}
        self._now = 0  # the latest turn whose text was begun

    def opened(self, address: str, texts: int, tokens: int) -> list[int]:
        """Count texts of this address; the turn of each."""
        self.completions[address] += texts
        self.tokens[address] += tokens
        first = max(self._now, self._last.get(address, 0)) + 1
        self._last[address] = first + texts - 1
        return list(range(first, first + texts))

    def begun(self, turn: int) -> None:
        """A text of this turn has its first token."""
        self._now = max(self._now, turn)

    def closed(self, address: str, texts: int, tokens: int) -> None:
        """They are over; of an address that has none left nothing is kept."""
        self.completions[address] -= texts
        self.tokens[address] -= tokens
        if not self.completions[address]:
            del self.completions[address], self.tokens[address]
            self._last.pop(address, None)
