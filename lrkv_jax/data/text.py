"""Text that every tokenizer takes."""

from __future__ import annotations


def valid(text: str) -> str:
    """Lone surrogates, which JSON and a command line can spell and UTF-8 cannot, become U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
