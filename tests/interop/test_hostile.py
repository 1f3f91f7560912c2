"""Damaged and hostile folders: each is one line, and no run is left."""

import json
import struct
from functools import partial

import jax
import numpy as np
import pytest
from support.hf_folders import RECORDED, hf_folder, tokenizer_json, write
from support.planted_models import drawn

from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.errors import LrkvError
from lrkv_jax.interop import importing, shards
from lrkv_jax.interop.importing import import_model

Q = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr(importing, "make_mesh", partial(make_mesh, devices=jax.devices()[:1]))


def change(function):
    """Of a function (folder, ...): one (...) that returns what it does to a folder."""
    return lambda *arguments, **how: lambda folder: function(folder, *arguments, **how)


def edit_json(path, edit):
    said = json.loads(path.read_text())
    edit(said)
    path.write_text(json.dumps(said))


@change
def config(folder, **changes):
    edit_json(folder / "config.json", lambda said: said.update(changes))


@change
def vocabulary(folder, edit):
    edit_json(folder / "tokenizer.json", lambda said: edit(said["model"]))


@change
def file(folder, name, content):
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


@change
def removed(folder, name):
    (folder / name).unlink()


@change
def header(folder, edit):
    """A change of the header of model.safetensors, or another one."""
    path = folder / shards.SINGLE
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    said = json.loads(whole[8:end])
    text = json.dumps(edit(said) or said).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])


def entry(**changes):
    return header(lambda said: said[Q].update(changes))


def move_out(said):
    size = max(e["data_offsets"][1] for n, e in said.items() if n != "__metadata__")
    start, end = said[Q]["data_offsets"]
    said[Q]["data_offsets"] = [size, size + end - start]


@change
def length(folder, number):
    """Another length of the header."""
    with (folder / shards.SINGLE).open("r+b") as opened:
        opened.write(struct.pack("<Q", number))


@change
def torn(folder):
    path = folder / shards.SINGLE
    path.write_bytes(path.read_bytes()[:-10])


@change
def tensors(folder, edit):
    """Other tensors."""
    arrays = drawn(RECORDED["nanochat"]["shapes"])
    edit(arrays)
    write(folder, arrays)


@change
def last_number(folder, value, dtype=np.float32):
    arrays = drawn(RECORDED["nanochat"]["shapes"])
    arrays[Q] = arrays[Q].astype(dtype)
    arrays[Q].flat[-1] = value
    write(folder, arrays)


@change
def index(folder, content):
    (folder / shards.SINGLE).rename(folder / "model-00001-of-00001.safetensors")
    (folder / shards.INDEX).write_text(json.dumps({"weight_map": content}))


DEEP = "[" * 200_000 + "]" * 200_000
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_ctx": 64, "n_embd": 32,
    "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 272,
}  # fmt: skip

CASES = {
    # config.json
    "config-absent": (removed("config.json"), "no config.json"),
    "config-list": (file("config.json", "[]"), "not a JSON mapping"),
    "config-deep": (file("config.json", DEEP), "config.json"),
    "gpt-2": (file("config.json", json.dumps(GPT2)), "architectures = GPT2LMHeadModel"),
    "architectures-text": (config(architectures="NanoChatForCausalLM"), "architectures"),
    "vocabulary-10^12": (config(vocab_size=10**12), "different models"),
    "vocabulary-10^30": (config(vocab_size=10**30), "vocab_size"),
    "layers-10^9": (config(num_hidden_layers=10**9), "1000000000"),
    "layers-missing": (
        lambda d: edit_json(d / "config.json", lambda said: said.pop("num_hidden_layers")),
        "num_hidden_layers",
    ),
    "width-text": (config(hidden_size="32"), "hidden_size"),
    "width-other": (config(hidden_size=48), f"{EMBEDDING} is [272, 32], and config.json makes it"),
    "groups-three": (config(num_key_value_heads=3), "kv_heads"),
    "base-nan": (config(rope_parameters={"rope_theta": float("nan")}), "rope_"),
    "rope-list": (config(rope_parameters=[1]), "rope_parameters"),
    "rope-factor-text": (config(rope_parameters={"rope_type": "linear", "factor": "x"}), "factor"),
    "partial-rotary-text": (config(partial_rotary_factor="half"), "partial_rotary_factor"),
    "bias": (config(attention_bias=True), "attention_bias = True, and only False is taken"),
    "activation": (config(hidden_act="gelu"), "hidden_act = gelu: use relu2"),
    "activation-list": (config(hidden_act=["silu"]), "hidden_act"),
    "window": (config(sliding_window=16), "train.seq_len=16 or less"),
    "window-text": (config(sliding_window="x"), "sliding_window"),
    "experts": (config(num_local_experts=8), "num_local_experts = 8: mixtures of experts"),
    "quantized": (config(quantization_config={"quant_method": "gptq"}), "gptq"),
    # model.safetensors
    "tensors-absent": (removed(shards.SINGLE), "no model.safetensors"),
    "torn": (torn(), "torn: fetch it again"),
    "header-past-the-end": (length(10**6), "torn"),
    "header-zero": (length(0), "safetensors"),
    "header-list": (header(lambda said: [1]), "safetensors"),
    "header-deep": (
        file(shards.SINGLE, len(DEEP).to_bytes(8, "little") + DEEP.encode()), "safetensors"
    ),
    "entry-empty": (header(lambda said: said.update({Q: {}})), Q),
    "shape-negative": (entry(shape=[-32, -32]), Q),
    "shape-overflows": (entry(shape=[2**62, 2**62]), Q),
    "offsets-turned": (entry(data_offsets=[4096, 0]), Q),
    "offsets-outside": (header(move_out), "torn"),
    "dtype-unknown": (entry(dtype="F32X"), "F32X"),
    "dtype-half-of-it": (entry(dtype="F16"), "torn"),
    "nan": (last_number(np.nan), f"{Q} has"),
    "beyond-float32": (last_number(1e300, np.float64), f"{Q} has"),
    "a-tensor-absent": (tensors(lambda a: a.pop(Q)), f"no tensor {Q}: fetch the model again"),
    "a-tensor-cut": (tensors(lambda a: a.update({Q: a[Q][:-1]})), "different models"),
    "a-tensor-more": (tensors(lambda a: a.update({"model.vision.weight": a[Q]})), "vision"),
    # the index
    "index-list": (index([1]), "weight_map"),
    "index-outside": (index({Q: "../../etc/passwd"}), "weight_map"),
    "index-absent": (index({Q: "x.safetensors"}), "x.safetensors"),
    # the tokenizer
    "tokenizer-absent": (removed("tokenizer.json"), "tokenizer.json"),
    "tokenizer-other": (
        file("tokenizer.json", tokenizer_json(*(f"<{n}>" for n in range(40)), "<s>")),
        "297 ids, and the model 272: it is another model's",
    ),
    "tokenizer-text": (file("tokenizer.json", "hello"), "tokenizer"),
    "tokenizer-id-2^32": (vocabulary(lambda said: said["vocab"].update(zz=2**32 - 1)), "ids"),
    "tokenizer-merge": (vocabulary(lambda said: said.update(merges=["q q"])), "tokenizer"),
    "settings-list": (file("tokenizer_config.json", "[]"), "tokenizer_config.json"),
    "settings-bos-list": (file("tokenizer_config.json", '{"bos_token": [1]}'), "bos_token"),
    "template-bytes": (file("chat_template.jinja", b"\xff"), "chat_template.jinja"),
    "template-deep": (file("chat_template.jinja", "{{ " + "(" * 10**5), "is not a template"),
    "template-number": (file("tokenizer_config.json", '{"chat_template": 1}'), "no text"),
    "names-list": (
        lambda d: (file("chat_template.jinja", "x")(d), file("special_tokens_map.json", "[]")(d)),
        "special_tokens_map.json",
    ),
    "generation-end": (file("generation_config.json", '{"eos_token_id": ["a"]}'), "eos_token_id"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_folder_is_one_line_and_leaves_no_run(case, tmp_path):
    change, named = CASES[case]
    change(hf_folder(tmp_path / "hf"))
    with pytest.raises(LrkvError) as raised:
        import_model(str(tmp_path / "hf"), tmp_path / "run", say=lambda _: None)
    line = str(raised.value)
    assert named in line and "\n" not in line and len(line) < 1000
    assert ":" in line, "what is wrong, then what to do"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
