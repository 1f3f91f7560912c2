"""Parquet files in FineWeb-Edu's exact schema, of sentences from the embedded corpus, shuffled."""

import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from lrkv_jax.data.sources import documents

SCHEMA = pa.schema(
    [
        ("text", pa.string()), ("id", pa.string()), ("dump", pa.string()), ("url", pa.string()),
        ("file_path", pa.string()), ("language", pa.string()), ("language_score", pa.float64()),
        ("token_count", pa.int64()), ("score", pa.float64()), ("int_score", pa.int64()),
    ]
)  # fmt: skip


def make(folder: Path, *, files: int, rows: int, groups: int = 3) -> None:
    """Write `files` files of `rows` documents of about 4.5 KB, each in `groups` row groups."""
    folder.mkdir(parents=True, exist_ok=True)
    text = " ".join(documents("sotu", "train"))
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", text) if s]
    for number in range(files):
        _write(folder / f"{number:03d}_00000.parquet", sentences, rows, groups, number)


def _write(path: Path, sentences: list[str], rows: int, groups: int, seed: int) -> None:
    draw = random.Random(seed)
    texts = [_document(draw, sentences) for _ in range(rows)]
    score = [draw.uniform(2.5, 5) for _ in texts]
    table = pa.table(
        {
            "text": texts,
            "id": [f"<urn:uuid:{draw.getrandbits(128):032x}>" for _ in texts],
            "dump": ["CC-MAIN-2024-10"] * rows,
            "url": [f"https://example.org/{draw.getrandbits(40):x}" for _ in texts],
            "file_path": [f"s3://commoncrawl/crawl-data/{seed}.warc.gz"] * rows,
            "language": ["en"] * rows,
            "language_score": [draw.uniform(0.65, 1) for _ in texts],
            "token_count": [len(text) // 5 for text in texts],
            "score": score,
            "int_score": [round(value) for value in score],
        },
        schema=SCHEMA,
    )
    compression = ("zstd", "snappy")[seed % 2]
    pq.write_table(table, path, compression=compression, row_group_size=-(-rows // groups))


def _document(draw: random.Random, sentences: list[str]) -> str:
    """Some paragraphs; most characters are ASCII, as in the real ones, and a few are not."""
    chosen = draw.choices(sentences, k=draw.randint(2, 60))
    chosen = [s if draw.random() < 0.97 else f"{s} “café – 日本” {draw.random()}" for s in chosen]
    return "".join(s + draw.choice((" ", " ", " ", "\n", "\n\n")) for s in chosen).rstrip()
