"""Pages of a cache: who holds which, and which beginnings of prompts they still keep.

A page holds the entries of `PAGE` consecutive tokens of a sequence, in every layer. A page whose
tokens all came from prompts is published under the digest of everything up to its end: a later
prompt that begins with the same tokens shares it. Pages that nobody holds stay published until
their room is needed, the end of a chain first.

Layers with a window read the last pages of a sequence alone. Their entries are in window pages, of
which each page has one until it is out of the windows of all who hold it.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from lrkv_jax.kernels.gpu.schedule import TILE

PAGE = TILE  # tokens: the tile of the kernels, which read a page at a time
# The page to which rows without a sequence write, and a table's unused entries point.
NULL = 0


def digests(ids: Sequence[int]) -> list[bytes]:
    """The digest of each whole page of `ids` and all before it."""
    found, before = [], b""
    for start in range(0, len(ids) - PAGE + 1, PAGE):
        own = np.asarray(ids[start : start + PAGE], np.int32).tobytes()
        before = blake2b(before + own, digest_size=32).digest()
        found.append(before)
    return found


class _WindowPages:
    """The window pages of a pool: which page has which of them, and how many hold it."""

    def __init__(self, window: int, pages: int, of: int):
        self.window = window
        self.page = [NULL] * of  # of each page of the pool
        self._holders = [0] * of
        self._unused = list(range(pages - 1, NULL, -1))
        self._idle: dict[int, None] = {}  # pages whose window page nobody holds

    @property
    def free(self) -> int:
        return len(self._unused) + len(self._idle)

    def out_of_window(self, tokens: int) -> int:
        """The first pages of a sequence that no token after `tokens` of them sees."""
        return max(0, tokens - self.window + 1) // PAGE

    def take(self, page: int) -> None:
        """Give a page a window page, with one holder."""
        if not self._unused:
            self.drop(next(iter(self._idle)))
        self.page[page], self._holders[page] = self._unused.pop(), 1

    def hold(self, page: int) -> None:
        self._holders[page] += 1
        self._idle.pop(page, None)

    def release(self, page: int, *, keep: bool) -> None:
        """Take a holder from a page's window page; after the last one it is free.

        With `keep` it stays the page's until its room is needed.
        """
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._idle[page] = None
            if not keep:
                self.drop(page)

    def drop(self, page: int) -> None:
        """Take the window page, if it has one, from a page for which nobody holds it."""
        if page in self._idle:
            del self._idle[page]
            self._unused.append(self.page[page])
            self.page[page] = NULL


class Pool:
    """The pages of one device's cache, or of one shard of the sequences: 1 to `pages` − 1.

    window, window_pages: of layers with a window, whose pages are 1 to `window_pages` − 1. span:
    the most of those that a sequence holds.
    """

    def __init__(self, pages: int, window: int | None = None, window_pages: int = 0, span: int = 0):
        self.span = span
        self._unused = list(range(pages - 1, NULL, -1))
        self._holders = [0] * pages
        self._pages: dict[bytes, int] = {}  # by their digests
        self._published: dict[int, bytes] = {}  # their digests
        self._idle: dict[int, None] = {}  # published and held by nobody, the next to go first
        self._window_pages = None if window is None else _WindowPages(window, window_pages, pages)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._unused) + len(self._idle)

    @property
    def free_window_pages(self) -> int:
        """Window pages that nobody holds; as many as pages where there are none."""
        return self.free if self._window_pages is None else self._window_pages.free

    def out_of_window(self, tokens: int) -> int:
        """The first pages of a sequence that no window reaches after `tokens` tokens."""
        return 0 if self._window_pages is None else self._window_pages.out_of_window(tokens)

    def window_pages_of(self, pages: Sequence[int], released: int = 0) -> list[int]:
        """The window pages of a sequence's pages; NULL for the first ones, which it released."""
        if self._window_pages is None:
            return []
        return [NULL] * released + [self._window_pages.page[page] for page in pages[released:]]

    def holders(self, page: int) -> int:
        """How many sequences have the page in their tables."""
        return self._holders[page]

    def shared(self, wanted: Iterable[bytes]) -> list[int]:
        """The published pages that the digests `wanted` begin with; nobody holds them by this."""
        found: list[int] = []
        for digest in wanted:
            if digest not in self._pages:
                break
            found.append(self._pages[digest])
        if self._window_pages is not None:
            there = [page != NULL for page in self.window_pages_of(found)]
            while not all(there[self.out_of_window(len(found) * PAGE) : len(found)]):
                found.pop()
        return found

    def hold(self, pages: Sequence[int]) -> int:
        """Add a holder to each of some published pages; how many are out of the window at once."""
        released = self.out_of_window(len(pages) * PAGE)
        for place, page in enumerate(pages):
            self._holders[page] += 1
            self._idle.pop(page, None)
            if self._window_pages is not None and place >= released:
                self._window_pages.hold(page)
        return released

    def take(self, count: int, released: int = 0) -> list[int]:
        """Take `count` of the `free` pages, which nobody holds or finds; each gets one holder.

        All but the first `released` get a window page.
        """
        taken = []
        for place in range(count):
            if self._unused:
                page = self._unused.pop()
            else:
                page = next(iter(self._idle))
                del self._idle[page], self._pages[self._published.pop(page)]
                if self._window_pages is not None:
                    self._window_pages.drop(page)
            self._holders[page] = 1
            if self._window_pages is not None and place >= released:
                self._window_pages.take(page)
            taken.append(page)
        return taken

    def release_window_pages(self, pages: Iterable[int]) -> None:
        """Take a holder from the window pages of some pages of a sequence."""
        for page in pages:
            if self._window_pages is not None:
                self._window_pages.release(page, keep=page in self._published)

    def give_back(self, pages: Sequence[int], released: int = 0) -> None:
        """Take a holder from each page of a sequence, which lists them in its order.

        The window pages of the first `released` are not the sequence's any more.
        """
        self.release_window_pages(reversed(pages[released:]))
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._published:
                    self._idle[page] = None
                else:
                    self._unused.append(page)

    def publish(self, page: int, digest: bytes) -> None:
        """Let others find a page that is written to its end and will not change again."""
        if page not in self._published and digest not in self._pages:
            self._published[page] = digest
            self._pages[digest] = page
