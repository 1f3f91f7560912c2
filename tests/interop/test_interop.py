"""Models come in and go out exactly, byte for byte, or not at all; hostile ones leave no run."""

import json
import struct
from functools import partial

import jax
import numpy as np
import pytest
from support.hand_built import CHATS
from support.hf_folders import RECORDED, hf_folder, tokenizer_json, write
from support.marks import quick
from support.planted_models import FULL_MLA, IDS, LLAMA, YARN, configured, drawn, plant

from lrkv_jax.config import load_config
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.hub import FILE as PROVENANCE
from lrkv_jax.data.tokenizer import CHAT_NAMES, foreign_tokenizer, load_tokenizer
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.errors import LrkvError
from lrkv_jax.interop import importing, shards
from lrkv_jax.interop.architectures import of_config
from lrkv_jax.interop.export import export
from lrkv_jax.interop.importing import import_model
from lrkv_jax.training.restore import load_run

pytestmark = pytest.mark.usefixtures("loaded_on_one_device")
FULL, JOINT = "attention=lrkv", ("attention.rope=shared", "attention.latent_norm=joint")
KINDS = [FULL, "model.layers_pattern=SG", "model.window=8"]
QWEN3 = (*LLAMA, "model.qk_norm=true", "model.qk_gain=true")


@pytest.mark.parametrize("case", quick("llama-3.1", "nanochat", slow=RECORDED))
def test_an_imported_model_gives_the_logits_that_transformers_gave(case, tmp_path):
    import_model(str(hf_folder(tmp_path / "hf", case)), tmp_path / "run", say=lambda _: None)
    logits = np.asarray(load_run(tmp_path / "run").model(IDS))
    np.testing.assert_allclose(logits[0, :, :16], RECORDED[case]["logits"], rtol=0, atol=1e-5)


ROUND_TRIPS = {
    "lrkv-groups": (FULL, "attention.rank=3", "attention.kv_heads=2", *QWEN3, YARN),
    "mla": (*FULL_MLA, "attention.rank=2", "attention.latent_norm=false"),
    "shards": ("attention=gqa", "model.tied_head=true", "model.qkv_bias=true", *LLAMA,
               "mesh.tensor=2"),  # which another number of devices takes too
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_export_import_export_gives_identical_bytes(case, tmp_path, monkeypatch):
    largest = 20_000 if case == "shards" else 10**9
    plant(tmp_path / "run", *ROUND_TRIPS[case])
    export(tmp_path / "run", tmp_path / "one", largest=largest)
    if case == "shards":
        two_devices = partial(make_mesh, devices=jax.devices()[:2])
        monkeypatch.setattr(importing, "make_mesh", two_devices)
    import_model(str(tmp_path / "one"), tmp_path / "again", say=lambda _: None)
    export(tmp_path / "again", tmp_path / "two", largest=largest)
    one, two = (
        {p.name: p.read_bytes() for p in (tmp_path / name).iterdir() if p.name != "README.md"}
        for name in ("one", "two")
    )
    assert one == two and one.keys() > {"config.json", "tokenizer.json", "generation_config.json"}
    if case == "shards":
        assert shards.INDEX in one
        export(tmp_path / "run", tmp_path / "half", dtype="bfloat16")
        whole, half = shards.read(tmp_path / "one"), shards.read(tmp_path / "half")
        for name, tensor in half.items():
            assert np.array_equal(tensor.make(), whole[name].make().astype(tensor.dtype))
    else:
        logits = [np.asarray(load_run(tmp_path / name).model(IDS)) for name in ("run", "again")]
        np.testing.assert_allclose(*logits, rtol=0, atol=1e-5)


def test_a_run_can_be_moved_and_used_from_another_folder(tmp_path, monkeypatch):
    # No generation_config.json; the tokenizer has 257 ids, and the model 272.
    hf_folder(tmp_path / "hf", "smollm2", eos_token_id=[50, 60], bos_token_id=260)
    (tmp_path / "hf" / shards.INDEX).write_text("{}")  # left over: the single file is read
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made = import_model("../hf", "run", say=lambda _: None)
    assert made.data.tokenizer == "run/tokenizer"
    with pytest.raises(LrkvError, match="^run exists: name another"):
        import_model("nobody/nothing", "run")  # said before anything is fetched
    before = load_run("run").ids("The Union")
    assert {50, 60} <= set(load_run("run").tokenizer.eos_token_ids)
    export("run", "../one")
    (tmp_path / "here/run").rename(tmp_path / "moved")
    (tmp_path / "here/tokenizer").mkdir()  # another, which the working directory has
    for folder, there in ((tmp_path / "here", "../moved"), (tmp_path, "moved")):
        monkeypatch.chdir(folder)
        run = load_run(there)
        assert run.ids("The Union") == before
        assert run.config.data.tokenizer == f"{there}/tokenizer"
    shown = {"score": 0.5, "dataset": {"demonstration": True}}
    evaluation = {"step": 0, "mmlu": shown, "bpb": {"bits_per_byte": 1.25}}
    for name, more in (("other", {"changed_settings": ["x"]}), ("two", {})):
        (tmp_path / "moved/evaluation.json").write_text(json.dumps(evaluation | more))
        export(tmp_path / "moved", name)
    assert "1.25" not in (tmp_path / "other/README.md").read_text(), "it is of another model"
    card = (tmp_path / "two/README.md").read_text()
    assert "| trained here | no |" in card and str(tmp_path) not in card
    assert "| mmlu, demonstration set, score | 0.5000 |" in card
    assert "| bpb, bits_per_byte | 1.2500 |" in card
    written = json.loads((tmp_path / "two/config.json").read_text())
    assert written["eos_token_id"] == [50, 60] and "bos_token_id" not in written
    for path in (tmp_path / "one").glob("*.json"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    scale = tmp_path / "more.yaml"
    scale.write_text("name: more\ntrain: {steps: 3, batch: 8}\n")
    assert load_config(scale, ["init_from=moved"]).data.tokenizer == "moved/tokenizer"
    assert str(tmp_path) not in (tmp_path / "moved/config.yaml").read_text()


def test_a_head_beside_the_table_that_it_is_tied_to_is_the_same_or_refused(tmp_path):
    folder = hf_folder(tmp_path / "hf", "smollm2")
    arrays = drawn(RECORDED["smollm2"]["shapes"])
    for sign, name in ((1, "same"), (-1, "another")):
        write(folder, arrays | {"lm_head.weight": sign * arrays["model.embed_tokens.weight"]})
        if sign > 0:
            assert import_model(str(folder), tmp_path / name, say=lambda _: None).model.tied_head
            continue
        with pytest.raises(LrkvError, match="they differ: set tie_word_embeddings to false"):
            import_model(str(folder), tmp_path / name, say=lambda _: None)


def test_a_window_that_the_context_hides_is_told(tmp_path):
    hidden = ["its window of 5 is no shorter than the context"]
    for context, told in (("5", hidden), ("5e0", hidden), ("16", []), ("1_6", []), ("0x10", [])):
        folder, lines = hf_folder(tmp_path / f"hf{context}", "mistral-window"), []
        made = import_model(
            str(folder), tmp_path / f"run{context}", [f"train.seq_len={context}"], say=lines.append
        )
        assert (made.model.window is None) == bool(told)
        assert [line.partition(",")[0] for line in lines if "window" in line] == told
    # Of some layers, and left to the class's default.
    folder, lines = hf_folder(tmp_path / "hf", "qwen2", **SOME_LAYERS), []
    edit_json(folder / "config.json", lambda said: said.pop("sliding_window"))
    assert import_model(str(folder), tmp_path / "run", say=lines.append).model.window is None
    assert "its window of 4096 is no shorter than the context" in "".join(lines)


def test_a_model_without_a_class_is_refused_by_name_and_leaves_nothing(tmp_path):
    for name, settings, named in (
        ("mla", ["attention=mla"], "attention.rope = decoupled"),
        ("normed", FULL_MLA, "latent_norm = true, .*: use --as factored"),
        ("latent", [], "attention.rope = latent, .*: use --as factored"),
        ("norms", [FULL, "model.embedding_norm=false"], "Chat.* needs model.embedding_norm=true"),
        ("joint", [FULL, *JOINT], "attention.rope = shared, .*: use --as deepseek"),
        ("yarn", [FULL, YARN], "NanoChatForCausalLM needs no yarn;"),
        ("biases", [FULL, "model.qkv_bias=true"], "NanoChatForCausalLM needs model.qkv_bias=false"),
        ("window", [FULL, "model.window=8"], "model.window = 8: no class that is written has"),
        ("kinds", KINDS, "layers_pattern = SG: .* model.layers_pattern=null model.window=null$"),
        ("heads", [*LLAMA, "attention=mha", "model.heads=3"], "Llama.* needs .* model.heads = 3;"),
        ("none", ["attention.rope=none"], "attention.rope = none, .*: train it in rope: full"),
        ("unrotated", ["attention=gqa", "attention.rope=none"], "rope = none, .* rope: full"),
    ):
        configured(tmp_path / name, *settings)
        with pytest.raises(LrkvError, match=named):
            export(tmp_path / name, tmp_path / "hf")
    for name, named in (("joint", "softcap=null$"), ("mla", "null and attention=lrkv .*=joint$")):
        with pytest.raises(LrkvError, match=f"Deep.* needs model.gated=true and .*{named}"):
            export(tmp_path / name, tmp_path / "hf", form="deepseek")
    without = (
        ("mla", "MLA-12"),
        ("joint", "LRKV-4 rope shared, joint norm"),
        ("none", "LRKV-4 rope"),
    )
    for name, label in without:
        with pytest.raises(LrkvError, match=f"attention {label}.* has no factors .*: leave it out"):
            export(tmp_path / name, tmp_path / "hf", form="factored")
    with pytest.raises(LrkvError, match="form = small: use factored or deepseek"):
        export(tmp_path / "mla", tmp_path / "hf", form="small")
    with pytest.raises(LrkvError, match="dtype = float16: use float32 or bfloat16"):
        export(tmp_path / "mla", tmp_path / "hf", dtype="float16")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/mine").touch()
    with pytest.raises(LrkvError, match="kept exists: name another"):
        export(tmp_path / "mla", tmp_path / "kept")
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["v_proj.bias", "o_proj.weight"])
def test_what_biases_of_values_are_folded_from_must_be_there_in_its_shape(name, tmp_path):
    folder, name = hf_folder(tmp_path / "hf", "qwen2"), f"model.layers.1.self_attn.{name}"
    arrays = drawn(RECORDED["qwen2"]["shapes"])
    whole = arrays.pop(name)
    for held, message in ((arrays, "has no tensor"), ({**arrays, name: whole[1:]}, "makes it")):
        write(folder, held)
        with pytest.raises(LrkvError, match=message) as raised:
            import_model(str(folder), tmp_path / "run", say=lambda _: None)
        assert name in str(raised.value) and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_gpt2_leaves_with_the_chat_in_its_own_ids(tmp_path):
    import tokenizers

    gpt2 = "data.tokenizer=gpt2", "model.vocabulary=50304"
    plant(tmp_path / "run", "attention=mha", *gpt2, CHATS)
    export(tmp_path / "run", tmp_path / "hf")
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json"))
    chat = ChatFormat(load_tokenizer("gpt2"))
    assert [written.token_to_id(name) for name in CHAT_NAMES] == list(vars(chat.ids).values())
    text = "The cache of 128 tokens, \n\n  it's  half-full \t日本 e\u0301!"
    assert written.encode(text).ids == chat.tokenizer.prompt(text)


def test_a_tokenizer_that_loses_bytes_is_taken_and_counted(tmp_path):
    definition = json.loads(tokenizer_json("<|endoftext|>", normalizer={"type": "NFC"}))
    del definition["model"]["vocab"]["Ã"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    lines = []
    tokenizer = foreign_tokenizer(str(tmp_path), lines.append)
    assert "lacks 1 of the 256 bytes" in lines[0] and "changes texts" in lines[1]
    assert tokenizer.decode(tokenizer.encode("e\u0301 <|endoftext|>")) == "\ufffd <|endoftext|>"


Q = "model.layers.1.self_attn.q_proj.weight"


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
def entry(folder, **changes):
    """Another entry of Q in the header of model.safetensors."""
    path = folder / shards.SINGLE
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    said = json.loads(whole[8:end])
    said[Q].update(changes)
    text = json.dumps(said).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[end:])


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
    "vocabulary-10^12": (config(vocab_size=10**12), "different models"),
    "layers-10^9": (config(num_hidden_layers=10**9), "has no tensor model.layers.2."),
    "layers-missing": (
        lambda d: edit_json(d / "config.json", lambda said: said.pop("num_hidden_layers")),
        "num_hidden_layers",
    ),
    "groups-three": (config(num_key_value_heads=3), "kv_heads"),
    "base-nan": (config(rope_parameters={"rope_theta": float("nan")}), "rope_"),
    "rope-list": (config(rope_parameters=[1]), "rope_parameters"),
    "rope-yarn": (config(rope_parameters={"type": "yarn"}), "yarn is not taken of NanoChatForC"),
    "bias": (config(attention_bias=True), "attention_bias = True, and only False is taken"),
    # model.safetensors
    "tensors-absent": (removed(shards.SINGLE), "no model.safetensors"),
    "tensors-not-on-the-hub": (
        lambda d: (d / shards.SINGLE).rename(d / PROVENANCE), "has none: save it as safetensors"
    ),
    "torn": (torn(), "torn: fetch it again"),
    "header-past-the-end": (file(shards.SINGLE, struct.pack("<Q", 10**6) + b"{}"), "torn"),
    "header-deep": (
        file(shards.SINGLE, len(DEEP).to_bytes(8, "little") + DEEP.encode()), "safetensors"
    ),
    "shape-floats": (entry(shape=[32.0, 32]), f"({Q}: TypeError)"),
    "quantized": (entry(dtype="I32"), "is I32, and weights are F64, F32, F16, BF16 here: take"),
    "dtype-half-of-it": (entry(dtype="F16"), "torn"),
    "nan": (last_number(np.nan), f"{Q} has"),
    "beyond-float32": (last_number(1e300, np.float64), f"{Q} has"),
    "a-tensor-cut": (tensors(lambda a: a.update({Q: a[Q][:-1]})), "different models"),
    "a-tensor-more": (tensors(lambda a: a.update({"model.vision.weight": a[Q]})), "vision"),
    # the index
    "index-outside": (index({Q: "../../etc/passwd"}), "weight_map"),
    "index-absent": (index({Q: "x.safetensors"}), "x.safetensors"),
    # the tokenizer
    "tokenizer-absent": (removed("tokenizer.json"), "tokenizer.json"),
    "tokenizer-other": (
        file("tokenizer.json", tokenizer_json(*(f"<{n}>" for n in range(40)), "<s>")),
        "297 ids, and the model 272: it is another model's",
    ),
    "tokenizer-id-2^32": (vocabulary(lambda said: said["vocab"].update(zz=2**32 - 1)), "ids"),
    "tokenizer-merge": (vocabulary(lambda said: said.update(merges=["q q"])), "tokenizer"),
    "template-bytes": (file("chat_template.jinja", b"\xff"), "chat_template.jinja"),
    "template-deep": (file("chat_template.jinja", "{{ " + "(" * 10**5), "is not a template"),
    "template-number": (file("tokenizer_config.json", '{"chat_template": 1}'), "no text"),
    "generation-end": (file("generation_config.json", '{"eos_token_id": ["a"]}'), "eos_token_id"),
}  # fmt: skip


SLIDING = {"sliding_window": 8, "use_sliding_window": True}
SOME_LAYERS = {"use_sliding_window": True, "max_window_layers": 1,
               "layer_types": ["full_attention", "sliding_attention"]}  # fmt: skip
LINEAR = {"kind": "linear", "factor": 4.0}
LLAMA3 = {"kind": "llama3", "factor": 8.0, "original_context": 32, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0}  # fmt: skip


def test_fields_of_a_config_mean_what_they_mean_to_transformers():
    """Those that a class does not read, that are missing, and that stand twice."""
    for name, changes, key, expected in (
        ("smollm2", SLIDING, "window", None),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": None}, "window", None),
        ("qwen3", SLIDING, "window", None),  # its layer_types are all full
        ("qwen3", {**SLIDING, "layer_types": None}, "window", None),  # from layer 28 of 2 on
        ("qwen2", {**SLIDING, "layer_types": None, "max_window_layers": 0}, "window", 8),
        ("mistral-window", {}, "window", 5),
        # Mistral reads none of these.
        ("mistral-window", {"use_sliding_window": False}, "window", 5),
        ("mistral-window", {"max_window_layers": 28}, "window", 5),
        ("mistral-window", {"layer_types": ["full_attention"] * 2}, "window", 5),
        ("arcee", {"hidden_act": None}, "activation", "relu2"),
        ("arcee", {"rms_norm_eps": None}, "norm_eps", 1e-5),
        ("llama-3.1", {"original_max_position_embeddings": 32}, "rope_scaling", LLAMA3),
        ("smollm2", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling", LINEAR),
    ):
        config = {**RECORDED[name]["config"], **changes}
        config = {key: value for key, value in config.items() if value is not None}
        assert of_config(config, 64)[1][key] == expected, (name, changes)
    some = {**RECORDED["qwen3"]["config"], **SLIDING, "layer_types": ["sliding_attention", "full"]}
    with pytest.raises(LrkvError, match="of some layers .* train.seq_len=8 or less"):
        of_config(some, 64)


def test_a_factored_export_has_no_scaling_that_a_server_would_take_for_a_longer_context(tmp_path):
    """Its frequencies are scaled; vLLM multiplies the context by the factor of a linear one."""
    linear = "model.rope_scaling={kind: linear, factor: 4}"
    plant(tmp_path / "run", FULL, linear, "model.rope_base=500")
    export(tmp_path / "run", tmp_path / "hf", form="factored")
    written = json.loads((tmp_path / "hf/config.json").read_text())
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 500}
    assert written["key_frequencies"][0] == 1 / 4 and written["max_position_embeddings"] == 32


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
