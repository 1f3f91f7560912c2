"""Damaged and hostile folders: each is one line within seconds, and no run is left."""

import json
import os
import signal
import struct
from contextlib import contextmanager
from functools import partial

import jax
import ml_dtypes
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
SECONDS = 10


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr(importing, "make_mesh", partial(make_mesh, devices=jax.devices()[:1]))


@contextmanager
def within(seconds):
    """A read of a pipe that nobody writes would never end."""

    def late(*_):
        raise TimeoutError(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def config(drop=(), **changes):
    """A change of config.json."""

    def change(folder):
        path = folder / "config.json"
        said = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in said.items() if k not in drop}))

    return change


def file(name, content):
    def change(folder):
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def header(edit, body=None):
    """A change of the header of model.safetensors."""

    def change(folder):
        path = folder / shards.SINGLE
        whole = path.read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        said = json.loads(whole[8:end])
        text = json.dumps(edit(said) or said).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])

    return change


def entry(name=Q, **changes):
    return header(lambda said: said[name].update(changes))


def length(number, size=None):
    """Another length of the header."""

    def change(folder):
        path = folder / shards.SINGLE
        with path.open("r+b") as opened:
            opened.write(struct.pack("<Q", number))
            if size:
                opened.truncate(size)

    return change


def special(name, make):
    """Something that is no file where a file should be."""

    def change(folder):
        path = folder / name
        path.unlink(missing_ok=True)
        make(path)

    return change


def sparse(name, size=2**40):
    def change(folder):
        with (folder / name).open("wb") as opened:
            opened.truncate(size)

    return change


def weights(edit):
    """Another array in place of a tensor."""

    def change(folder):
        arrays = drawn(RECORDED["nanochat"]["shapes"])
        arrays[Q] = edit(arrays[Q])
        write(folder, arrays)

    return change


def one(array, value):
    array = np.array(array)
    array.flat[-1] = value
    return array


def index(content):
    def change(folder):
        (folder / shards.SINGLE).rename(folder / "model-00001-of-00001.safetensors")
        (folder / shards.INDEX).write_text(json.dumps(content))

    return change


def tokenizer(**changes):
    return file("tokenizer.json", tokenizer_json("<|endoftext|>", **changes))


def vocabulary(edit):
    def change(folder):
        path = folder / "tokenizer.json"
        said = json.loads(path.read_text())
        edit(said)
        path.write_text(json.dumps(said))

    return change


def swap_places(said):
    """Two tensors of one shape that share their bytes."""
    other = Q.replace("layers.1", "layers.0")
    said[Q]["data_offsets"] = said[other]["data_offsets"]


def move_out(said):
    size = max(e["data_offsets"][1] for n, e in said.items() if n != "__metadata__")
    start, end = said[Q]["data_offsets"]
    said[Q]["data_offsets"] = [size, size + end - start]


def fifo(path):
    os.mkfifo(path)


def zero(path):
    path.symlink_to("/dev/zero")


def loop(path):
    path.symlink_to(path.name)


DEEP = "[" * 200_000 + "]" * 200_000
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_ctx": 64, "n_embd": 32,
    "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 272,
}  # fmt: skip
NESTED = '{"type":"Sequence","normalizers":[' * 600 + '{"type":"NFC"}' + "]}" * 600

CASES = {
    # config.json
    "config-empty": (file("config.json", ""), "config.json"),
    "config-list": (file("config.json", "[]"), "not a JSON mapping"),
    "config-deep": (file("config.json", DEEP), "config.json"),
    "config-latin-1": (file("config.json", b'{"a": "\xe9"}'), "config.json"),
    "config-long-number": (file("config.json", '{"a": ' + "9" * 5000 + "}"), "config.json"),
    "config-huge": (sparse("config.json"), "config.json"),
    "config-fifo": (special("config.json", fifo), "config.json"),
    "config-device": (special("config.json", zero), "config.json"),
    "config-loop": (special("config.json", loop), "config.json"),
    "config-folder": (special("config.json", lambda p: p.mkdir()), "config.json"),
    "gpt-2": (file("config.json", json.dumps(GPT2)), "architectures = GPT2LMHeadModel"),
    "architectures-text": (config(architectures="NanoChatForCausalLM"), "architectures"),
    "architectures-number": (config(architectures=7), "architectures"),
    "architectures-nested": (config(architectures=[{}]), "architectures"),
    "architectures-none": (config(architectures=[]), "architectures"),
    "vocabulary-10^12": (config(vocab_size=10**12), "different models"),
    "vocabulary-10^30": (config(vocab_size=10**30), "vocab_size"),
    "vocabulary-negative": (config(vocab_size=-1), "vocab_size"),
    "vocabulary-fraction": (config(vocab_size=272.5), "vocab_size"),
    "layers-10^9": (config(num_hidden_layers=10**9), "1000000000"),
    "layers-10^18": (config(num_hidden_layers=10**18), "layers"),
    "layers-none": (config(num_hidden_layers=None), "layers"),
    "layers-missing": (config(drop=["num_hidden_layers"]), "num_hidden_layers"),
    "width-text": (config(hidden_size="32"), "hidden_size"),
    "width-10^12": (config(hidden_size=10**12), "config.json"),
    "width-list": (config(hidden_size=[32]), "hidden_size"),
    "heads-zero": (config(num_attention_heads=0), "num_attention_heads"),
    "heads-10^15": (config(num_attention_heads=10**15), "head"),
    "heads-true": (config(num_attention_heads=True), "num_attention_heads"),
    "head-width-text": (config(head_dim="x"), "head"),
    "groups-text": (config(num_key_value_heads="4"), "num_key_value_heads"),
    "groups-three": (config(num_key_value_heads=3), "kv_heads"),
    "hidden-10^12": (config(intermediate_size=10**12), "different models"),
    "context-text": (config(max_position_embeddings="64"), "max_position_embeddings"),
    "context-zero": (config(max_position_embeddings=0), "max_position_embeddings"),
    "context-true": (config(max_position_embeddings=True), "max_position_embeddings"),
    "epsilon-nan": (config(rms_norm_eps=float("nan")), "norm_eps"),
    "epsilon-text": (config(rms_norm_eps="x"), "norm_eps"),
    "base-nan": (config(rope_parameters={"rope_theta": float("nan")}), "rope_"),
    "base-text": (config(rope_parameters={"rope_theta": "much"}), "rope_theta"),
    "base-none": (config(rope_parameters={"rope_theta": None}), "rope_theta"),
    "rope-list": (config(rope_parameters=[1]), "rope_parameters"),
    "rope-kind-list": (config(rope_parameters={"rope_type": [1]}), "rope"),
    "rope-factor-text": (config(rope_parameters={"rope_type": "linear", "factor": "x"}), "factor"),
    "partial-rotary-text": (config(partial_rotary_factor="half"), "partial_rotary_factor"),
    "activation-list": (config(hidden_act=["silu"]), "hidden_act"),
    "quantised-text": (config(quantization_config="int4"), "quantised"),
    "window-text": (config(sliding_window="x"), "sliding_window"),
    "cap-text": (config(final_logit_softcapping="x"), "softcap"),
    "experts-list": (config(num_experts=[8]), "num_experts"),
    # model.safetensors
    "header-past-the-end": (length(10**6), "torn"),
    "header-2^63": (length(2**63), "torn"),
    "header-zero": (length(0), "torn"),
    "header-sparse": (length(99_999_990, 100_000_000), "model.safetensors"),
    "header-list": (header(lambda said: [1]), "safetensors"),
    "header-deep": (
        file(shards.SINGLE, len(DEEP).to_bytes(8, "little") + DEEP.encode()), "safetensors"
    ),
    "entry-list": (header(lambda said: said.update({Q: [1]})), Q),
    "entry-empty": (header(lambda said: said.update({Q: {}})), Q),
    "shape-text": (entry(shape="32"), Q),
    "shape-negative": (entry(shape=[-32, -32]), Q),
    "shape-fraction": (entry(shape=[32.0, 32]), Q),
    "shape-overflows": (entry(shape=[2**62, 2**62]), Q),
    "offsets-one": (entry(data_offsets=[0]), Q),
    "offsets-text": (entry(data_offsets=["0", "4096"]), Q),
    "offsets-turned": (entry(data_offsets=[4096, 0]), Q),
    "offsets-negative": (entry(data_offsets=[-4096, 0]), Q),
    "offsets-overlap": (header(swap_places), "torn"),
    "offsets-outside": (header(move_out), "torn"),
    "dtype-list": (entry(dtype=["F32"]), Q),
    "dtype-unknown": (entry(dtype="F32X"), "F32X"),
    "dtype-int64": (entry(dtype="I64"), "I64"),
    "dtype-half-of-it": (entry(dtype="F16"), "torn"),
    "weights-fifo": (special(shards.SINGLE, fifo), shards.SINGLE),
    "weights-device": (special(shards.SINGLE, zero), shards.SINGLE),
    "weights-empty": (file(shards.SINGLE, ""), "torn"),
    "nan": (weights(lambda a: one(a, np.nan)), f"{Q} has"),
    "infinity": (weights(lambda a: one(a, np.inf)), f"{Q} has"),
    "beyond-float32": (weights(lambda a: one(a.astype(np.float64), 1e300)), f"{Q} has"),
    "nan-bfloat16": (weights(lambda a: one(a.astype(ml_dtypes.bfloat16), np.nan)), f"{Q} has"),
    # the index
    "index-list": (index({"weight_map": [1]}), "weight_map"),
    "index-number": (index({"weight_map": {Q: 1}}), "weight_map"),
    "index-nested": (index({"weight_map": {Q: []}}), "weight_map"),
    "index-outside": (index({"weight_map": {Q: "../../etc/passwd"}}), "weight_map"),
    "index-absolute": (index({"weight_map": {Q: "/dev/zero"}}), "weight_map"),
    "index-absent": (index({"weight_map": {Q: "x.safetensors"}}), "x.safetensors"),
    "index-device": (
        lambda d: (index({"weight_map": {Q: "x.safetensors"}})(d), zero(d / "x.safetensors")),
        "x.safetensors",
    ),
    # the tokenizer
    "tokenizer-text": (file("tokenizer.json", "hello"), "tokenizer"),
    "tokenizer-bytes": (file("tokenizer.json", b"\xff\xfe\x00"), "tokenizer"),
    "tokenizer-list": (file("tokenizer.json", "[]"), "tokenizer"),
    "tokenizer-deep": (file("tokenizer.json", DEEP), "tokenizer"),
    "tokenizer-huge": (sparse("tokenizer.json"), "tokenizer.json"),
    "tokenizer-fifo": (special("tokenizer.json", fifo), "tokenizer.json"),
    "tokenizer-device": (special("tokenizer.json", zero), "tokenizer.json"),
    "tokenizer-id-2^32": (vocabulary(lambda t: t["model"]["vocab"].update(zz=2**32 - 1)), "ids"),
    "tokenizer-merge": (vocabulary(lambda t: t["model"].update(merges=["q q"])), "tokenizer"),
    "tokenizer-nested": (
        file("tokenizer.json", tokenizer_json("<s>").replace('r": null', f'r": {NESTED}', 1)),
        "tokenizer",
    ),
    "tokenizer-regex": (
        tokenizer(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(((a{9999}){9999}){9999}"},
                                 "behavior": "Isolated", "invert": False}),
        "tokenizer",
    ),
    "tokenizer-aborts": (
        tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////wAA"}),
        "tokenizer",
    ),
    "settings-list": (file("tokenizer_config.json", "[]"), "tokenizer_config.json"),
    "settings-text": (file("tokenizer_config.json", "{"), "tokenizer_config.json"),
    "settings-deep": (file("tokenizer_config.json", DEEP), "tokenizer_config.json"),
    "settings-bos-list": (file("tokenizer_config.json", '{"bos_token": [1]}'), "bos_token"),
    "settings-fifo": (special("tokenizer_config.json", fifo), "tokenizer_config.json"),
    "template-fifo": (special("chat_template.jinja", fifo), "chat_template.jinja"),
    "template-bytes": (file("chat_template.jinja", b"\xff"), "chat_template.jinja"),
    "template-torn": (file("chat_template.jinja", "{% for m in"), "is not a template"),
    "template-deep": (file("chat_template.jinja", "{{ " + "(" * 10**5), "is not a template"),
    "template-number": (file("tokenizer_config.json", '{"chat_template": 1}'), "no text"),
    "names-list": (
        lambda d: (file("chat_template.jinja", "x")(d), file("special_tokens_map.json", "[]")(d)),
        "special_tokens_map.json",
    ),
    "generation-list": (file("generation_config.json", "[]"), "generation_config.json"),
    "generation-end": (file("generation_config.json", '{"eos_token_id": ["a"]}'), "eos_token_id"),
    "generation-fifo": (special("generation_config.json", fifo), "generation_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_folder_is_one_line_in_seconds_and_leaves_no_run(case, tmp_path):
    change, named = CASES[case]
    change(hf_folder(tmp_path / "hf"))
    with within(SECONDS), pytest.raises(LrkvError) as raised:
        import_model(str(tmp_path / "hf"), tmp_path / "run", say=lambda _: None)
    line = str(raised.value)
    assert named in line and "\n" not in line and len(line) < 1000
    assert ":" in line, "what is wrong, then what to do"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_there_are_many_cases():
    assert len(CASES) >= 60
