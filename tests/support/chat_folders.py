"""Tokenizers with chat templates, made up, as folders of transformers have them.

No import of lrkv_jax: the script that records what transformers makes of them has none.
"""

import json
from pathlib import Path

TEMPLATES = Path(__file__).with_name("chat_templates")


def jinja(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


def alphabet():
    """GPT-2's stand-ins for bytes, in their order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [*map(chr, plain), *(chr(256 + n) for n in range(len(others)))]


def tokenizer(special, merges=(), **changes):
    """A tokenizer.json of 256 bytes, merges, and special tokens."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    pieces = [*alphabet(), *("".join(pair) for pair in merges)]
    added = [
        {"id": len(pieces) + n, "content": name, "special": not name.endswith("think>"), **plain}
        for n, name in enumerate(special)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None, "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None, "decoder": {**byte_level, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {piece: i for i, piece in enumerate(pieces)},
                  "merges": [list(pair) for pair in merges]},
    } | changes  # fmt: skip


def first(name, number):
    """A post-processor that puts a token before a text."""
    put, text = (
        {"SpecialToken": {"id": name, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    return {
        "type": "TemplateProcessing", "single": [put, text],
        "pair": [put, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]}},
    }  # fmt: skip


def folder(path, definition, settings, template=None, **more):
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(definition))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    for name, content in more.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ċ", "Ċ"), ("Ġ", "Ġ")]


def chatml(path):
    """As SmolLM2's: no token before a text, a template in tokenizer_config.json."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    settings = {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>", "chat_template": jinja("chatml"),
    }  # fmt: skip
    ends = {"eos_token_id": 264}
    return folder(path, tokenizer(special, MERGES), settings, generation_config=ends)


def blocks(path):
    """BOS before a text, tokens that are no special ones, a template in its own file."""
    special = ("<|bot|>", "<|eot|>", "<|head|>", "<|tail|>", "<think>", "</think>")
    definition = tokenizer(special, MERGES, post_processor=first("<|bot|>", 262))
    definition["normalizer"] = {"type": "NFC"}
    settings = {
        "bos_token": {"content": "<|bot|>", "__type": "AddedToken", "lstrip": False,
                      "rstrip": False, "normalized": False, "single_word": False},
        "eos_token": "<|eot|>",
        "chat_template": "{{ 'not this one' }}",
    }  # fmt: skip
    return folder(path, definition, settings, jinja("blocks"))


def inst(path):
    """As Llama 2's: turns between brackets, which are text; templates by name."""
    definition = tokenizer(("<unk>", "<s>", "</s>"), post_processor=first("<s>", 257))
    templates = [
        {"name": "tool_use", "template": "{{ 'tools' }}"},
        {"name": "default", "template": jinja("inst")},
    ]
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
                "chat_template": templates}  # fmt: skip
    return folder(path, definition, settings)


FOLDERS = {"chatml": chatml, "blocks": blocks, "inst": inst}
