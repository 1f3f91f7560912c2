"""Token ids to text as they come: whole characters, up to a stop string.

What was handed out is never taken back: text that may still turn out to begin a stop string is kept
until it cannot. In whatever pieces ids come, the text is the same.
"""

import codecs
from collections.abc import Callable, Sequence


class Words:
    """The text of ids that keep coming.

    piece: the bytes of the next id. rest: the bytes that are left when no more comes. stops:
    strings of which the first that is complete ends the text before it; of two that end at once the
    longer.
    """

    def __init__(
        self,
        piece: Callable[[int], bytes],
        rest: Callable[[], bytes] = lambda: b"",
        stops: Sequence[str] = (),
    ):
        self._piece, self._rest, self._stops = piece, rest, tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.handed = 0  # characters that `read` and `end` have given
        self.stopped: str | None = None  # the stop string that ended the text

    @property
    def length(self) -> int:
        """Characters so far, with those that are held back."""
        return self.handed + len(self._held)

    def read(self, token: int) -> str:
        """The text that is certain now and was not before. Nothing follows a stop string."""
        if self.stopped is not None:
            return ""
        return self._take(self._decoder.decode(self._piece(token)))

    def end(self) -> str:
        """The text that was held back, as no more comes."""
        if self.stopped is not None:
            return ""
        text = self._take(self._decoder.decode(self._rest(), final=True))
        return text + self._hand(len(self._held))

    def _take(self, text):
        # A stop string that was not there before ends in the new text.
        before = len(self._held)
        self._held += text
        found = None
        for stop in self._stops:
            start = self._held.find(stop, max(0, before - len(stop) + 1))
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = start + len(stop), start, stop
        if found is not None:
            _, start, self.stopped = found
            given = self._hand(start)
            self._held = ""
            return given
        return self._hand(len(self._held) - self._begun())

    def _begun(self):
        """Characters at the end that may begin a stop string."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

    def _hand(self, count):
        given, self._held = self._held[:count], self._held[count:]
        self.handed += count
        return given
