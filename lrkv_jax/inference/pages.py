"""Pages of a cache: who holds which, and which beginnings of prompts they still keep.

A page holds the entries of `PAGE` consecutive tokens of a sequence, in every layer. A page whose
tokens all came from prompts is published under the digest of everything up to its end: a later
prompt that begins with the same tokens shares it. Pages that nobody holds stay published until
their room is needed, the end of a chain first.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from lrkv_jax.kernels.gpu.schedule import TILE

PAGE = TILE  # tokens: the tile of the kernels, which read a page at a time
# The page to which rows without a sequence write, and a table's unused entries point.
NULL = 0


class Digest(NamedTuple):
    """Hash of a page and all before it, with the page's ids, which are compared too."""

    chain: bytes
    ids: bytes


def digests(ids: Sequence[int]) -> list[Digest]:
    """Digests of each whole page of `ids`."""
    found: list[Digest] = []
    before = b""
    for start in range(0, len(ids) - PAGE + 1, PAGE):
        own = np.asarray(ids[start : start + PAGE], np.int32).tobytes()
        before = blake2b(before + own, digest_size=32).digest()
        found.append(Digest(before, own))
    return found


class Pool:
    """The pages of one device's cache, or of one shard of the sequences: 1 to `pages` − 1."""

    def __init__(self, pages: int):
        self._unused = list(range(pages - 1, NULL, -1))
        self._holders = [0] * pages
        self._pages: dict[bytes, int] = {}  # of a chain's digest
        self._published: dict[int, Digest] = {}
        self._idle: dict[int, None] = {}  # published and held by nobody, the next to go first

    @property
    def free(self) -> int:
        """Pages that `take` can give."""
        return len(self._unused) + len(self._idle)

    def holders(self, page: int) -> int:
        """How many sequences have the page in their tables."""
        return self._holders[page]

    def shared(self, wanted: Iterable[Digest]) -> list[int]:
        """The published pages that the chain `wanted` begins with; nobody holds them by this."""
        found: list[int] = []
        for digest in wanted:
            page = self._pages.get(digest.chain, NULL)
            if page == NULL or self._published[page].ids != digest.ids:
                break
            found.append(page)
        return found

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to each of some published pages."""
        for page in pages:
            self._holders[page] += 1
            self._idle.pop(page, None)

    def take(self, count: int) -> list[int]:
        """Take `count` of the `free` pages, which nobody holds or finds; each gets one holder."""
        taken = []
        for _ in range(count):
            if self._unused:
                page = self._unused.pop()
            else:
                page = next(iter(self._idle))
                del self._idle[page], self._pages[self._published.pop(page).chain]
            self._holders[page] = 1
            taken.append(page)
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Take a holder from each page of a sequence, which lists them in its order."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._published:
                    self._idle[page] = None
                else:
                    self._unused.append(page)

    def publish(self, page: int, digest: Digest) -> None:
        """Let others find a page that is written to its end and will not change again."""
        if page not in self._published and digest.chain not in self._pages:
            self._published[page] = digest
            self._pages[digest.chain] = page
