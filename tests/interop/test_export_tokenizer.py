"""An exported folder has the tokenizer and the chat template that the run has."""

import json

import pytest
from support.planted_models import plant

from lrkv_jax.data.tokenizer import byte_alphabet
from lrkv_jax.interop.export import export
from lrkv_jax.interop.tokenizer_files import KEPT, TEMPLATE

CHAT = "{%- for turn in messages -%}{{- '<|im_start|>' + turn['content'] -}}{%- endfor -%}"


def tokenizer_folder(folder, **settings):
    """What an import keeps of a tokenizer: 256 bytes and an end of text, with its chat template."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    files = {
        "tokenizer.json": {
            "added_tokens": [{"id": 256, "content": "<|endoftext|>", "special": True, **plain}],
            "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "merges": [],
                      "vocab": {piece: i for i, piece in enumerate(byte_alphabet())}},
        },
        "tokenizer_config.json": {"eos_token": "<|endoftext|>", **settings},
        "special_tokens_map.json": {"eos_token": "<|endoftext|>"},
        "generation_config.json": {"eos_token_id": 256},
    }  # fmt: skip
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("factored", [False, True], ids=["whole", "factored"])
@pytest.mark.parametrize("inside", [False, True], ids=["its-own-file", "in-the-settings"])
def test_an_imported_runs_chat_template_is_exported_as_it_came(factored, inside, tmp_path):
    kept = tokenizer_folder(tmp_path / "kept", **({"chat_template": CHAT} if inside else {}))
    if not inside:
        (kept / "chat_template.jinja").write_text(CHAT)
    plant(tmp_path / "run", "attention=lrkv", f"data.tokenizer={kept}")
    export(tmp_path / "run", tmp_path / "hf", factored=factored)
    names = {path.name for path in kept.iterdir()}
    assert names <= set(KEPT)
    for name in names:
        assert (tmp_path / "hf" / name).read_bytes() == (kept / name).read_bytes()
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["eos_token_id"] == 256


@pytest.mark.parametrize("factored", [False, True], ids=["whole", "factored"])
def test_a_run_with_the_chats_tokens_is_exported_with_our_template(factored, tmp_path):
    plant(tmp_path / "run", "attention=lrkv", "model.vocabulary=4224")
    export(tmp_path / "run", tmp_path / "hf", factored=factored)
    settings = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert settings["chat_template"] == TEMPLATE
