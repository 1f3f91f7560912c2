"""Functions of text alone."""

from collections.abc import Iterable


def valid(text: str) -> str:
    """Replace lone surrogates, which JSON can hold and UTF-8 cannot, by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def cut(text: str, stops: Iterable[str]) -> str:
    """Return the text before the first stop string that occurs in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]
