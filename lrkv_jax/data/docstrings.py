"""A second held-out text: docstrings of Python's standard library.

An order of variants on one text alone may be an order of how they fit that text.
"""

import json
import lzma

import numpy as np

from lrkv_jax.data.assets import read_asset
from lrkv_jax.data.tokenizer import Tokenizer


def docstrings() -> list[str]:
    """The docstrings of each module, one text a module."""
    lines = lzma.decompress(read_asset("stdlib.jsonl.xz")).decode().splitlines()
    return [json.loads(line)["text"] for line in lines]


def docstring_rows(tokenizer: Tokenizer, context: int) -> np.ndarray:
    """The text as records: int32 [rows, context + 1], each from the last id of the one before.

    Each module's docstrings begin with BOS. The last row is filled up with complemented ids, which
    are no targets (`lrkv_jax.training.token_batch`).
    """
    ids = [i for one in tokenizer.encode_batch(docstrings()) for i in (tokenizer.bos, *one)]
    rows = -(-(len(ids) - 1) // context)
    padded = np.full(rows * context + 1, ~tokenizer.bos, np.int32)
    padded[: len(ids)] = ids
    return np.stack([padded[row * context : (row + 1) * context + 1] for row in range(rows)])
