"""Folders of tiny models as transformers writes them, from what it recorded of them."""

import json
from pathlib import Path

from support.planted_models import drawn

from lrkv_jax.data.tokenizer import byte_alphabet
from lrkv_jax.interop import shards

RECORDED = json.loads((Path(__file__).parents[1] / "interop/recorded.json").read_text())


def tokenizer_json(*special, **changes):
    """256 bytes, no merges, and special tokens."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": 256 + n, "content": s, "special": True, **plain} for n, s in enumerate(special)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    vocab = {piece: i for i, piece in enumerate(byte_alphabet())}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return json.dumps(
        {"added_tokens": added, "normalizer": None, "pre_tokenizer": byte_level,
         "post_processor": None, "decoder": byte_level, "model": model} | changes
    )  # fmt: skip


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
