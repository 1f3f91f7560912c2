"""Folders of tiny models as transformers writes them, from what it recorded of them."""

import json
from pathlib import Path

from support import chat_folders
from support.planted_models import drawn

from lrkv_jax.interop import shards

RECORDED = json.loads((Path(__file__).parents[1] / "interop/recorded.json").read_text())


def tokenizer_json(*special, **changes):
    """256 bytes, no merges, and special tokens."""
    return json.dumps(chat_folders.tokenizer(special, **changes))


def hf_folder(folder, case="nanochat", **changes):
    """A folder as transformers writes it, of a recorded case."""
    said = RECORDED[case]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(said["config"] | changes))
    (folder / "tokenizer.json").write_text(tokenizer_json("<|endoftext|>"))
    write(folder, drawn(said["shapes"]))
    return folder


def write(folder, arrays, largest=10**9):
    made = [shards.Tensor(n, a.shape, a.dtype, lambda a=a: a) for n, a in arrays.items()]
    shards.write(folder, made, largest)
