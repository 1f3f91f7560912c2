"""Token ids to text as they come: whole characters, up to a stop string.

What was emitted is never taken back: text that may still turn out to begin a stop string is kept
until it cannot. In whatever pieces ids come, the text is the same.
"""

import codecs
from collections.abc import Callable, Sequence


class Detokenizer:
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
        self._pending = ""
        self.emitted = 0  # characters that `read` and `end` have returned
        self.stop_string: str | None = None  # the stop string that ended the text

    @property
    def length(self) -> int:
        """Characters so far, with those that are held back."""
        return self.emitted + len(self._pending)

    def read(self, token: int) -> str:
        """The text that is certain now and was not before. Nothing follows a stop string."""
        if self.stop_string is not None:
            return ""
        return self._add(self._decoder.decode(self._piece(token)))

    def end(self) -> str:
        """The text that was held back, as no more comes."""
        if self.stop_string is not None:
            return ""
        text = self._add(self._decoder.decode(self._rest(), final=True))
        return text + self._emit(len(self._pending))

    def _add(self, text):
        # A stop string that was not there before ends in the new text.
        before = len(self._pending)
        self._pending += text
        found = []
        for stop in self._stops:
            start = self._pending.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if found:
            _, start, self.stop_string = min(found)
            text = self._emit(start)
            self._pending = ""
            return text
        return self._emit(len(self._pending) - self._stop_prefix())

    def _stop_prefix(self):
        """Characters at the end that may begin a stop string."""
        for length in range(min(self._longest - 1, len(self._pending)), 0, -1):
            end = self._pending[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0

    def _emit(self, count):
        text, self._pending = self._pending[:count], self._pending[count:]
        self.emitted += count
        return text
