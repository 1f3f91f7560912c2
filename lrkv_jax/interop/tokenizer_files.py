"""A run's tokenizer as transformers reads it: tokenizer.json, its settings, the chat template."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers

from lrkv_jax import files
from lrkv_jax.data.assets import read_asset
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.chat_template import FILE
from lrkv_jax.data.tokenizer import CHAT_NAMES, EMBEDDED, byte_alphabet
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference.trained_run import TrainedRun

# What an imported run keeps of the folder that it came from.
KEPT = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
# nanochat's: a leading system message goes before the first user's, with an empty line between.
TEMPLATE = """\
{%- set turns = messages -%}{%- set system = '' -%}
{%- if messages[0]['role'] == 'system' -%}
{%- set system = messages[0]['content'] + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- endif -%}
{{- bos_token -}}
{%- for turn in turns -%}
{%- if turn['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
{{- raise_exception('user and assistant take turns, the user first') -}}
{%- elif turn['role'] == 'user' -%}
{{- '<|user_start|>' + (system if loop.first else '') + turn['content'] + '<|user_end|>' -}}
{%- else -%}
{{- '<|assistant_start|>' + turn['content'] + '<|assistant_end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant_start|>' -}}{%- endif -%}
"""


def keep_special_ids(config_json: dict[str, Any], vocabulary: int, folder: Path) -> None:
    """Write generation_config.json, if none came, with the special ids of config.json.

    That is where transformers looks for the ends of a text then. Ids from `vocabulary` on, which
    the tokenizer does not have, are left out.
    """
    known, ids = range(vocabulary), {}
    for name in _SPECIAL:
        found = config_json.get(name)
        if all(one in known for one in (found if isinstance(found, list) else [found])):
            ids[name] = found
    if ids and not (folder / "generation_config.json").exists():
        files.write_json(folder / "generation_config.json", ids)


def write_tokenizer(run: TrainedRun, folder: Path) -> dict[str, Any]:
    """Write the run's tokenizer; returns the special ids for config.json.

    A chat's tokens and template are added where the run was trained to chat and has none. An
    imported run's is otherwise the one that came; others put BOS before a text.
    """
    tokenizer, chat = run.tokenizer, ChatFormat(run.tokenizer)
    source = Path(run.config.data.tokenizer)
    if source.is_dir() and str(source) not in EMBEDDED:
        for name in KEPT:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        generation = files.read_json(source / "generation_config.json", "delete it") or {}
        if tokenizer.template is None and chat.trained(run.config.data):
            _add_chat(chat, folder)
            generation["eos_token_id"] = list(chat.eos_token_ids)
            files.write_json(folder / "generation_config.json", generation)
        return {key: generation[key] for key in _SPECIAL if key in generation}
    definition = _definition(run.config.data.tokenizer)
    names = {token["id"]: token["content"] for token in definition["added_tokens"]}
    bos, end = names[tokenizer.bos], names[tokenizer.bos]
    special: dict[str, Any] = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.bos}
    settings: dict[str, Any] = {}
    if chat.trained(run.config.data):
        ids = dict(zip(CHAT_NAMES, vars(chat.ids).values(), strict=True))
        definition["added_tokens"] += [
            _added(name, i) for name, i in sorted(ids.items(), key=lambda pair: pair[1])
            if i not in names
        ]  # fmt: skip
        settings["chat_template"] = TEMPLATE
        end = "<|assistant_end|>"
        special["eos_token_id"] = [ids[end], tokenizer.bos]
    special["pad_token_id"] = tokenizer.bos
    # A single text; pairs are joined.
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, _SEQUENCE],
        "pair": [{"SpecialToken": {"id": bos, "type_id": 0}}, _SEQUENCE,
                 {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos], "tokens": [bos]}},
    }  # fmt: skip
    content = json.dumps(definition, ensure_ascii=False, indent=1)
    files.write(folder / "tokenizer.json", content)
    files.write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": end,
            "pad_token": bos,
            "model_max_length": run.config.train.seq_len,
            "clean_up_tokenization_spaces": False,
            **settings,
        },
    )
    files.write_json(folder / "generation_config.json", special)
    return special


_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}


def _add_chat(chat: ChatFormat, folder: Path) -> None:
    """Add the chat's tokens to the folder's tokenizer.json, and its template as a file.

    Raises `LrkvError` for a tokenizer that gives the tokens other ids than the run has.
    """
    path = str(folder / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    backend.add_special_tokens(list(CHAT_NAMES))
    for name, i in zip(CHAT_NAMES, vars(chat.ids).values(), strict=True):
        if (found := backend.token_to_id(name)) != i:
            raise LrkvError(
                f"tokenizer {chat.tokenizer.name} makes {name} {found}, and the run learned it as "
                f"{i}: train with a tokenizer without gaps in its ids, and without {name}"
            )
    backend.save(path)
    # Written out: the settings that came may name another BOS, or none.
    start = backend.id_to_token(chat.tokenizer.bos) if chat.tokenizer.begins else ""
    files.write(folder / FILE, TEMPLATE.replace("{{- bos_token -}}", start))


def _definition(name: str) -> dict[str, Any]:
    """The tokenizer.json of a named tokenizer or of a file, as this project reads it."""
    if name != "gpt2":
        content = read_asset("sotu-4096.json") if name == "sotu-4096" else Path(name).read_bytes()
        return json.loads(content)
    lines = gzip.decompress(read_asset("gpt2.bpe.gz")).decode().split("\n")[1:-1]
    pieces = [*byte_alphabet(), *(line.replace(" ", "") for line in lines)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added("<|endoftext|>", len(pieces))],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": lines,
        },
    }  # fmt: skip


def _added(name: str, i: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": i, "content": name, **flags, "special": True}
