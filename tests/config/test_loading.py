"""Loading a configuration: what overrides do, what comes back, and what bad input is told."""

import copy
import json
import re
from pathlib import Path

import pytest
import yaml
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lrkv_jax.config import dump_config, find_config, load_config
from lrkv_jax.config.load import as_settings, config_from
from lrkv_jax.config.old_names import RENAMED
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.attention import GQA, LRKV, make_attention


def complaint(path, *overrides):
    """The message about bad input, which is one line without a trace of pydantic."""
    with pytest.raises(LrkvError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message and "pydantic" not in message, message
    return message


def write(folder, text):
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def edited(folder, edit, scale="128m"):
    """A shipped scale's file after `edit` has changed its mapping."""
    raw = yaml.safe_load(find_config(scale).read_text())
    edit(raw)
    return write(folder, yaml.safe_dump(raw))


def test_overrides_choose_change_and_add_variants():
    plain = load_config("128m")
    config = load_config("128m", ["attention.kv_heads=2", "attention=gqa"])
    assert config.attention == "gqa"
    assert config.model.attention == config.variants["gqa"] == GQA(kv_heads=2)
    assert config.variants == {**plain.variants, "gqa": GQA(kv_heads=2)}
    config = load_config("128m", ["variants.gqa.kv_heads=2", "variants.wide={kind: lrkv, rank: 9}"])
    assert config.variants == {**plain.variants, "gqa": GQA(kv_heads=2), "wide": LRKV(rank=9)}
    assert config.model.attention == LRKV(rank=46)
    assert config.variant("wide").model.attention == LRKV(rank=9)
    for added in (
        ["attention=wide", "attention.rank=7", "variants.wide={kind: lrkv, rank: 9}"],
        {"attention": "wide", "variants": {"wide": {"kind": "lrkv", "rank": 7}}},
    ):
        assert load_config("128m", added).model.attention == LRKV(rank=7)
    for group, changed in (
        ("data", {"source": "mine"}), ("optimizer", {"grad_clip": 0.5}), ("attention", {"rank": 9}),
        ("model", {"dtype": "float32"}),
    ):  # fmt: skip
        as_text = load_config("128m", [f"{group}={json.dumps(changed)}"])
        assert as_text == load_config("128m", {group: changed}) != plain
    with pytest.raises(LrkvError, match="unknown key model.1: use one of layers"):
        load_config("128m", {"model": {1: 2}})
    plain = load_config("nano_latents")
    added = {"attention": "mqa", "variants": {"mqa": {}}, "optimizer": {}}
    chosen = load_config("nano_latents", added)
    assert chosen.model.attention.kind == "mqa" and chosen.optimizer == plain.optimizer
    # Another mode of MLA needs no word on the file's rope width.
    for setting in ("attention.rope", "variants.mla.rope"):
        chosen = load_config("nano", ["attention=mla", f"{setting}=full"]).model.attention
        assert (chosen.rope, chosen.qk_rope_head_dim) == ("full", 0)


def test_numbers_are_read_as_people_write_them(tmp_path):
    for text, value in (("1e-4", 1e-4), (".5", 0.5), ("1_000.5", 1000.5)):
        assert load_config("128m", [f"optimizer.matrix_lr={text}"]).optimizer.matrix_lr == value
        raw = find_config("128m").read_text().replace("matrix_lr: 0.02", f"matrix_lr: {text}")
        assert load_config(write(tmp_path, raw)).optimizer.matrix_lr == value
    for text in ("50e9", "50B", "0.05T"):
        train = load_config("128m", [f"train.tokens={text}", "train.global_batch_size=1.6e1"]).train
        assert (train.tokens, train.global_batch_size) == (50_000_000_000, 16)
    assert type(train.tokens) is type(train.global_batch_size) is int
    for text in ("1.5", "1e300", "-1e3", "true", ".inf", "5k", "0.1e-1B", "9999999999T"):
        assert "train.tokens = " in complaint("128m", f"train.tokens={text}")


def test_a_group_left_empty_can_be_filled_and_a_setting_emptied(tmp_path):
    path = edited(tmp_path, lambda raw: raw.update(mesh=None))
    config = load_config(path, ["mesh.tensor=2", "optimizer.grad_clip=null", "model.softcap=null"])
    assert config.mesh.tensor == 2 and config.optimizer.grad_clip is config.model.softcap is None


def test_a_shipped_scale_is_found_by_name_unless_a_file_has_that_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for path in ("128m", "128m.yaml", "configs/128m.yaml", "configs/128m"):
        assert load_config(path).name == "128m"
    (tmp_path / "128m").write_text(find_config("quickstart").read_text())
    assert load_config("128m").name == "quickstart"


@pytest.mark.parametrize("variant", ["mha", "gqa", "mqa", "mla", "lrkv", "lrkv_latent"])
def test_a_dump_of_any_variant_is_read_back_as_the_same_object(variant, tmp_path):
    config = load_config("quickstart", [f"attention={variant}"])
    assert config == load_config("quickstart").variant(variant)
    as_yaml = yaml.safe_dump(config.model_dump(mode="json"))
    for text in (dump_config(config), config.model_dump_json(), as_yaml):
        assert load_config(write(tmp_path, text)) == config
    overrides = ["attention=lrkv", "attention.rank=7", "train.steps=3"]
    path = write(tmp_path, dump_config(config))  # which takes overrides as the file does
    assert load_config(path, overrides) == load_config("quickstart", overrides)


floats = st.floats(1e-12, 1e12)
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
texts |= st.sampled_from(["1e5", "1.5e3", ".5", "no", "null", "12:30", "~", "é"])
names = st.from_regex(r"\A[A-Za-z0-9é\[:][A-Za-z0-9._ é\]-]{0,9}\Z")
names |= st.sampled_from(["1e5", "1.5e3", "no", "null", "12:30"])


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.fixed_dictionaries({
        "optimizer.matrix_lr": floats, "optimizer.grad_clip": st.none() | floats,
        "model.tied_head": st.booleans(), "attention.rank": st.integers(0, 128),
        "train.seed": st.integers(0, 2**32 - 1), "name": names, "data.source": texts,
        "train.sample_prompts": st.lists(texts, max_size=3),
    })
)  # fmt: skip
def test_any_settings_survive_the_round_trip(tmp_path, values):
    # Overrides are written by YAML itself, texts quoted, as a user has to.
    overrides = []
    for key, value in values.items():
        style = '"' if isinstance(value, str | list) else None
        overrides.append(f"{key}={yaml.safe_dump(value, default_style=style)}")
    config = load_config("128m", overrides)
    assert config.name == values["name"] and config.data.source == values["data.source"]
    assert config.train.sample_prompts == tuple(values["train.sample_prompts"])
    assert config.model.attention.rank == values["attention.rank"]
    assert config.optimizer.matrix_lr == values["optimizer.matrix_lr"]
    assert config.optimizer.grad_clip == values["optimizer.grad_clip"]
    path = tmp_path / "round_trip.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.layerz=2", "unknown key model.layerz: did you mean layers?"),
        ("variants.mha.rank=3", "unknown key variants.mha.rank: use one of rope"),
        ("model.layers=abc", "model.layers = 'abc' should be a valid integer"),
        ("model.layers=0", "model.layers = 0 should be greater than 0"),
        (
            "model.head_width=127",
            "model.head_width = 127 is odd, and rotation works on pairs: use 126 or 128",
        ),
        ("model.rope_scaling={kind: llama3, factor: 8}", "original_context is missing: give the"),
        ("model.rope_scaling={kind: linear, factor: 8, mscale: 1}", "mscale belongs to kind: yarn"),
        (
            "model.rope_scaling={kind: yarn, factor: 8, original_context: 64, beta_slow: 32}",
            "beta_slow = 32 is not below beta_fast = 32",
        ),
        ("attention=mha model.qk_gain=true model.qk_norm=false", "leaves it no norm: set"),
        ("attention=lrkv attention.rope=latent model.qk_gain=true", "LRKV-46 rope latent has none"),
        ("model.unroll=5", "model.unroll = 5 does not divide model.layers = 12: use 1 or 12"),
        ("model.layers_pattern=SG", "model.layers_pattern = SG has layers S: give model.window"),
        ("model.layers_pattern=SXG", "= 'SXG': use S (window) and G (all positions), or leave"),
        ("model.layers_pattern=SS", "or leave it out, and set model.window for layers that are"),
        (
            "model.layers_pattern=SSSSG model.window=9",
            "model.layers_pattern = SSSSG, 5 layers, does not divide model.layers = 12",
        ),
        ("model.window=2049", "model.window = 2049 is above train.seq_len = 2048: use 2048 or"),
        ("init_step=5", "init_step = 5 is of a run: give init_from"),
        ("guard={spike: null, skip_spikes: true}", "and guard.spike = null: give it a number"),
        ("model.window_attention=gqa", "window_attention is of layers S, and there is no"),
        ("model.window_attention=gqq", "= gqq is not a variant: did you mean gqa?"),
        (
            "model.layers_pattern=SG model.window=9 model.window_attention={kind: lrkv, rank: 999}",
            "model.window_attention: attention.rank = 999 is larger than head_width = 128",
        ),
        (
            "model.layers_pattern=SG model.window=9 model.window_attention={kind: gqa, kv_head: 2}",
            "unknown key model.window_attention.kv_head: did you mean kv_heads?",
        ),
        (
            "model.layers_pattern=SG model.window=9 model.unroll=3",
            "model.unroll = 3 does not divide model.layers = 12 into whole patterns: use 1 or 12",
        ),
        ("train.grad_accum_steps=3", "= 3 does not divide train.global_batch_size = 16: use a"),
        ("mesh.data=-1", "mesh.data and mesh.fsdp are both -1: only one axis can"),
        ("attention=lrvk", "attention = lrvk is not a variant: did you mean lrkv?"),
        ("attention.kind=gqa", "unknown key attention.rank: use one of rope, kv_heads"),
        ("variants.gqa={}", "variants.gqa.kv_heads is missing: give it a value"),
        ("variants={big: {kind: mha}}", "attention = lrkv is not a variant: use one of big"),
        ("variants=3", "variants = 3: name one, as in variants.lrkv.rank=64"),
        ("variants.foo.rank=3", "variants.foo: kind foo is unknown: use one of mha, gqa"),
        ("model.attention.rank=3", "choose with attention=NAME and change with attention.KEY"),
        ("train.seq_len.foo=3", "train.seq_len.foo: seq_len is a value, not a group of settings"),
        ("train.steps", "'train.steps' is not an override: write key=value, as in train.steps=100"),
        ("data.source=[", "'data.source=[': the value is not YAML; quote it"),
        ("name=!!timestamp foo", "'name=!!timestamp foo': the value is not YAML; quote it"),
        ("model.tied_head=!!bool maybe", "the value is not YAML; quote it"),
        ('run_dir="a\\0b"', r"run_dir = 'a\x00b' string should match"),
        ("train.seed=1" + "0" * 22, "000 should be less than 4294967296"),
        ("optimizer.grad_clip=.nan", "optimizer.grad_clip = '.nan' should be a valid number"),
        ("train.steps=10000000000", "a run of 10000000000 steps cannot be counted"),
        ("attention=gqa model.heads=1", "attention.kv_heads = 3 does not divide heads = 1: use 1"),
        ("attention=mla attention.rope=full attention.qk_rope_head_dim=64", "leave qk_rope_head"),
    ],
)
def test_a_bad_override_is_named_with_its_mend(override, message):
    several = re.match("attention=|model.layers_pattern=", override)
    separate = re.split(r" (?=\w+\.)", override) if several else [override]
    assert message in complaint("128m", *separate)


def test_a_run_has_one_length_and_an_override_replaces_the_files(tmp_path):
    stepped = load_config("128m", ["train.steps=5"]).train
    assert (stepped.steps, stepped.tokens, stepped.total_steps) == (5, None, 5)
    counted = load_config("quickstart", ["train.tokens=20490"]).train
    assert (counted.steps, counted.tokens, counted.total_steps) == (None, 20490, 10)
    assert load_config("128m", ["train.steps=null"]).train.tokens == 100_000_000_000
    once = "train.steps, train.tokens and train.epochs: give exactly one"
    text = "extends: quickstart\ntrain: {steps: 7, epochs: 2}"
    assert once in complaint(write(tmp_path, text))
    both = edited(tmp_path, lambda raw: raw["train"].update(steps=5))
    assert once in complaint(both)
    assert load_config(both, ["train.steps=7"]).train.tokens is None
    for other in ("train.tokens=9", "train.epochs=1"):
        assert "are both given: give exactly one" in complaint("128m", "train.steps=5", other)
    assert "give exactly one" in complaint("128m", "train.tokens=null")


@pytest.mark.parametrize(
    ("path", "mend"),
    [
        ("configs/quikstart.yaml", "did you mean quickstart?"),
        ("/nowhere/128m.yaml", "did you mean 128m?"),
        ("", "nano, nano_family, nano_latents, nano_ranks, quickstart, quickstart_midtrain"),
    ],
)
def test_a_missing_file_is_told_which_there_are(path, mend):
    message = complaint(path)
    assert message.startswith("no configuration ") and message.endswith(mend)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML: while parsing a flow node"),
        (b"\xff\xfe\x80", "run.yaml is not YAML: "),
        ("", "is not a mapping of settings: see the files under configs/"),
        ("name: x", "lists no variants: give at least `variants: {mha: {}}`"),
        ("variants: {mha: 3}", "variants.mha = 3: write its settings as a mapping"),
        ("variants: {mha.2: {kind: mha}}", "variants.mha.2: name it without a dot"),
        ("variants: {mha: {}}\nmodel: {}", "attention = None is not a variant: use one of mha"),
        ("variants: {mha: {}}\nmodel: {}\nattention: mha", "name is missing: give it a value"),
        ("train:\n  steps: 3\n  seed: 1\n  steps: 4", "steps stands twice, in lines 2 and 4"),
    ],
)
def test_a_file_that_is_no_configuration_is_told_why(text, message, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in complaint(path)


def test_a_wrong_key_of_a_file_s_variant_is_named_with_the_nearest(tmp_path):
    path = edited(tmp_path, lambda raw: raw["variants"].update(big={"kind": "lrkv", "rnk": 64}))
    assert complaint(path) == "run.yaml: unknown key variants.big.rnk: did you mean rank?"
    chosen = complaint(path, "attention=big")
    assert chosen == "run.yaml: unknown key attention.rnk: did you mean rank?"
    path = edited(tmp_path, lambda raw: raw["model"].update(attention={"kind": "lrkv", "rank": 5}))
    assert "choose with attention=NAME" in complaint(path)


def test_midtraining_takes_over_the_run_that_it_starts_from(tmp_path):
    run = load_config("2.5b", ["attention=mla"])
    (tmp_path / "config.yaml").write_text(dump_config(run))
    mid = load_config("configs/midtrain.yaml", [f"init_from={tmp_path}"])
    assert mid.model == run.model and mid.attention == "mla" and mid.variants == run.variants
    assert mid.name == "2.5b-midtrain" and mid.directory == "runs/2.5b-midtrain-mla"
    assert mid.train.global_batch_size * mid.train.seq_len == 524_288 and mid.train.epochs == 1
    assert mid.data.tokenizer == run.data.tokenizer and mid.data.mixture.loss == "all"
    assert [part.first for part in mid.data.mixture.heldout] == [24_000, 5_200, 420]
    assert mid.optimizer.matrix_lr == run.optimizer.matrix_lr
    rates = mid.optimizer
    assert (rates.schedule, rates.warmup_steps, rates.constant) == ("linear", 0, 0.8)
    mine = write(tmp_path, "attention: mha\ntrain: {global_batch_size: 8, steps: 4}")
    assert load_config(mine, [f"init_from={tmp_path}"]).attention == "mha"
    # The resolved file is whole: it needs the run it started from no more.
    (tmp_path / "mid.yaml").write_text(dump_config(mid))
    (tmp_path / "config.yaml").unlink()
    assert load_config(tmp_path / "mid.yaml") == mid
    changed = load_config(tmp_path / "mid.yaml", ["train.steps=7"])
    assert changed.train.epochs is None and changed.train.total_steps == 7


def test_a_file_extends_another_and_has_variants_of_its_own(tmp_path):
    (tmp_path / "base.yaml").write_text(Path("configs/quickstart.yaml").read_text())
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "extends: base\nname: mine\nattention: wide\n"
        "variants: {wide: {kind: lrkv, rank: 16}}\nmodel: {layers: 2, unroll: 1}\n"
    )
    run, base = load_config(mine, ["train.steps=7"]), load_config("quickstart")
    assert list(run.variants) == ["wide"] and run.model.attention.rank == 16
    assert (run.name, run.model.layers, run.train.steps) == ("mine", 2, 7)
    assert run.model.width == base.model.width and run.optimizer == base.optimizer
    assert "extends mine, which extends another" in complaint(write(tmp_path, "extends: mine"))
    assert "did you mean quickstart" in complaint(write(tmp_path, "extends: quickstrat"))
    for odd in ("[1]", "''", "x" * 300, "null"):
        assert "name a file next to it" in complaint(write(tmp_path, f"extends: {odd}"))


def test_settings_of_earlier_versions_are_read(tmp_path):
    """Their runs load; of variants that were given up, the results alone."""
    raw = as_settings(load_config("nano_family", ["attention=lrkv_full"]))
    old = copy.deepcopy(raw)
    old |= {"plan": {"refuse": False}, "data": old["data"] | {"keep_streams": False}}
    old |= {"model": old["model"] | {"decode_bits": "fast"}}
    for group, names in RENAMED.items():
        groups = [old[group]] if group in old else []
        groups += [v for v in old["variants"].values() if v["kind"] == group]
        for found in groups:
            for name in found.keys() & set(names.values()):
                (before,) = (one for one, new in names.items() if new == name)
                found[before] = found.pop(name)
    old["model"]["decode_cache"] = "whole"
    for entry in old["variants"].values():
        entry |= {"tied": False} if entry["kind"] == "lrkv" else {}
    assert config_from(old, "old") == config_from(copy.deepcopy(raw), "new")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    mid = load_config("midtrain", [f"init_from={tmp_path}"])
    assert mid.train.seq_len == raw["train"]["seq_len"]
    for kernel in ("whole", "dot_product"):
        named = {**old, "model": {**old["model"], "train_kernel": kernel}}
        assert config_from(named, "old").model.train_kernel == "chunked"
    old["variants"]["tied"] = {**old["variants"]["lrkv_latent"], "rank": 16, "tied": True}
    old["variants"]["turned"] = {"kind": "mla", "latent": 32, "rope_width": 0, "rope": "latent"}
    for name, label, values in (
        ("tied", "LRKV-16 rope latent, tied", 128),
        ("turned", "MLA-32 rope latent", 32),
    ):
        config = config_from({**old, "attention": name}, "old")
        assert config.model.attention.label == label
        assert config.model.attention.cache_values(config.model) == values
        assert config_from(as_settings(config), "again") == config
        with pytest.raises(LrkvError, match="was given up, and only its results can be read"):
            make_attention(config.model, rngs=nnx.Rngs(0))
    with pytest.raises(LrkvError, match="unknown key attention.tied"):
        load_config("nano", ["attention=lrkv", "attention.tied=true"])
