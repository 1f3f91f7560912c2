"""The blocks of documents that the experiments write."""

from pathlib import Path

from lrkv_jax.errors import LrkvError


def replace_between(path: Path, name: str, body: str) -> None:
    """Put `body` between the lines `<!-- NAME -->` and `<!-- end of NAME -->` of a document.

    Raises `LrkvError` where they do not occur once each, in this order.
    """
    text = path.read_text(encoding="utf-8")
    opening, closing = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(opening)
    _, ended, after = rest.partition(closing)
    if not (found and ended) or opening in rest or closing in after:
        raise LrkvError(f"{path} needs one {opening.strip()} and then one {closing}")
    path.write_text(f"{before}{opening}\n{body.strip()}\n\n{closing}{after}", encoding="utf-8")
