"""Loading a configuration: what overrides do, what comes back, and what bad input is told."""

import copy
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
from lrkv_jax.models.attention import GQA, LRKV, MHA, make_attention

SCALES = ["128m", "512m_8k", "1.2b", "2.5b", "6.3b", "quickstart"]
VARIANTS = ["mha", "gqa", "mqa", "mla", "lrkv", "lrkv_latent"]


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


# What overrides do.


def test_attention_names_the_line_and_attention_key_changes_it_alone():
    config = load_config("128m", ["attention.kv_heads=2", "attention=gqa"])
    assert config.attention == "gqa"
    assert config.model.attention == config.variants["gqa"] == GQA(kv_heads=2)
    plain = load_config("128m")
    assert config.variants == {**plain.variants, "gqa": GQA(kv_heads=2)}


def test_an_override_may_change_a_line_that_is_not_chosen_or_add_one():
    config = load_config("128m", ["variants.gqa.kv_heads=2", "variants.wide={kind: lrkv, rank: 9}"])
    assert config.variants["gqa"] == GQA(kv_heads=2)
    assert config.variants["wide"] == LRKV(rank=9)
    assert config.model.attention == LRKV(rank=46)
    assert config.variant("wide").model.attention == LRKV(rank=9)


def test_a_kind_of_its_own_lets_a_scale_list_a_variant_twice(tmp_path):
    path = edited(tmp_path, lambda raw: raw["variants"].update(lrkv64={"kind": "lrkv", "rank": 64}))
    assert load_config(path, ["attention=lrkv64"]).model.attention == LRKV(rank=64)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E+2", 100.0),
        ("2.5e-3", 0.0025),
        (".5", 0.5),
        ("3", 3.0),
        ("1_000.5", 1000.5),
    ],
)
def test_floats_are_read_as_people_write_them(text, value, tmp_path):
    assert load_config("128m", [f"optimizer.matrix_lr={text}"]).optimizer.matrix_lr == value
    path = write(
        tmp_path, find_config("128m").read_text().replace("matrix_lr: 0.02", f"matrix_lr: {text}")
    )
    assert load_config(path).optimizer.matrix_lr == value


def test_whole_numbers_may_be_written_as_floats():
    train = load_config("128m", ["train.tokens=50e9", "train.global_batch_size=1.6e1"]).train
    assert (train.tokens, train.global_batch_size) == (50_000_000_000, 16)
    assert type(train.tokens) is type(train.global_batch_size) is int
    for text in ("1.5", "1e300", "-1e3", "true", ".inf"):
        with pytest.raises(LrkvError, match="train.tokens = "):
            load_config("128m", [f"train.tokens={text}"])


def test_null_reaches_settings_that_may_be_absent():
    config = load_config("128m", ["optimizer.grad_clip=null", "model.softcap=null"])
    assert config.optimizer.grad_clip is None and config.model.softcap is None


def test_the_length_on_the_command_line_replaces_the_files():
    stepped = load_config("128m", ["train.steps=5"]).train
    assert (stepped.steps, stepped.tokens, stepped.total_steps) == (5, None, 5)
    counted = load_config("quickstart", ["train.tokens=20480"]).train
    assert (counted.steps, counted.tokens, counted.total_steps) == (None, 20480, 10)
    assert load_config("128m", ["train.steps=null"]).train.tokens == 100_000_000_000


def test_a_group_left_empty_in_the_file_can_be_filled(tmp_path):
    path = edited(tmp_path, lambda raw: raw.update(mesh=None))
    assert load_config(path, ["mesh.tensor=2"]).mesh.tensor == 2


@pytest.mark.parametrize("path", ["128m", "128m.yaml", "configs/128m.yaml", "configs/128m"])
def test_a_shipped_scale_is_found_by_name_from_any_folder(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert load_config(path).name == "128m"


def test_a_file_is_preferred_to_the_shipped_scale_of_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "128m").write_text(find_config("quickstart").read_text())
    assert load_config("128m").name == "quickstart"


# What comes back.


@pytest.mark.parametrize("scale", SCALES)
def test_a_dump_of_any_line_is_read_back_as_the_same_object(scale, tmp_path):
    dumps = [dump_config, dump_config, as_json, as_yaml, dump_config, dump_config]
    for variant, dump in zip(VARIANTS, dumps, strict=True):
        config = load_config(scale, [f"attention={variant}"])
        assert config == load_config(scale).variant(variant)
        assert load_config(write(tmp_path, dump(config))) == config


def as_json(config):
    return config.model_dump_json()


def as_yaml(config):
    return yaml.safe_dump(config.model_dump(mode="json"))


def test_a_dump_takes_overrides_as_the_file_does(tmp_path):
    path = write(tmp_path, dump_config(load_config("128m", ["attention=gqa"])))
    overrides = ["attention=lrkv", "attention.rank=7", "train.steps=3"]
    assert load_config(path, overrides) == load_config("128m", overrides)


floats = st.floats(1e-12, 1e12)
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    numbers=st.fixed_dictionaries(
        {
            "optimizer.matrix_lr": floats,
            "optimizer.adam_eps": floats,
            "optimizer.grad_clip": st.none() | floats,
            "model.softcap": st.none() | floats,
            "model.tied_head": st.booleans(),
            "attention.rank": st.integers(0, 128),
            "train.seed": st.integers(0, 2**32 - 1),
        }
    ),
    strings=st.fixed_dictionaries(
        {
            "name": st.from_regex(r"\A[A-Za-z0-9é\[:][A-Za-z0-9._ é\]-]{0,9}\Z")
            | st.sampled_from(["1e5", "1.5e3", "no", "null", "12:30", "é"]),
            "data.source": texts
            | st.sampled_from(["1e5", "1.5e3", ".5", "no", "null", "12:30", "~", "é"]),
        }
    ),
    prompts=st.lists(texts, max_size=3),
)
def test_any_settings_survive_the_round_trip(numbers, strings, prompts, tmp_path):
    values = {**numbers, **strings, "train.sample_prompts": prompts}
    # Overrides are written by YAML itself, quoted, as a user has to.
    overrides = [
        f"{key}={yaml.safe_dump(value, default_style='"')}" for key, value in strings.items()
    ]
    overrides += [f"{key}={'null' if v is None else str(v).lower()}" for key, v in numbers.items()]
    overrides.append("train.sample_prompts=" + yaml.safe_dump(prompts, default_style='"'))
    config = load_config("128m", overrides)
    assert config.name == values["name"] and config.data.source == values["data.source"]
    assert config.train.sample_prompts == tuple(prompts)
    assert config.model.attention.rank == values["attention.rank"]
    assert config.optimizer.matrix_lr == values["optimizer.matrix_lr"]
    path = tmp_path / "round_trip.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


# What bad input is told.


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.layerz=2", "unknown key model.layerz: did you mean layers?"),
        ("modle.layers=2", "unknown key modle: did you mean model?"),
        (
            "optimizer.muon.momentun=1",
            "unknown key optimizer.muon.momentun: did you mean momentum?",
        ),
        ("mesh.zz=1", "unknown key mesh.zz: use one of data, fsdp, context, tensor"),
        ("attention.ranks=3", "unknown key attention.ranks: did you mean rank?"),
        ("variants.mla.latents=3", "unknown key variants.mla.latents: did you mean latent_norm?"),
        ("variants.mha.rank=3", "unknown key variants.mha.rank: there is nothing to set there"),
        ("model.layers=abc", "model.layers = 'abc' should be a valid integer"),
        ("model.layers=2.5", "model.layers = 2.5 should be a valid integer"),
        ("model.layers=true", "model.layers = True should be a valid integer"),
        ("model.layers=0", "model.layers = 0 should be greater than 0"),
        ("model.tied_head=1", "model.tied_head = 1 should be a valid boolean"),
        ("optimizer.beta1=2", "optimizer.beta1 = 2 should be less than or equal to 1"),
        ("model.activation=relu", "model.activation = 'relu' should be 'relu2', 'gelu' or 'silu'"),
        ("attention.rope=ful", "attention.rope = 'ful' should be 'full', 'shared' or 'latent'"),
        ("attention.rank=-1", "attention.rank = -1 should be greater than or equal to 0"),
        (
            "variants.mla.kv_lora_rank=x",
            "variants.mla.kv_lora_rank = 'x' should be a valid integer",
        ),
        (
            "attention.rank=200",
            "attention.rank = 200 is larger than head_width = 128: use 0 (MQA) to",
        ),
        ("model.head_width=127", "model.head_width = 127 is odd"),
        ("model.head_width=127", "use 126 or 128"),
        ("model.head_width=1", "use 2"),
        (
            "model.rope_scaling={kind: dynamic, factor: 2}",
            "model.rope_scaling.kind = 'dynamic' should be 'linear', 'llama3' or 'yarn'",
        ),
        ("model.rope_scaling.kind=linear", "model.rope_scaling.factor is missing"),
        (
            "model.rope_scaling={kind: llama3, factor: 8}",
            "model.rope_scaling.original_context is missing: give the tokens",
        ),
        (
            "model.rope_scaling={kind: linear, factor: 8, mscale: 1}",
            "model.rope_scaling.mscale belongs to kind: yarn, and this is linear: leave it out",
        ),
        (
            "model.rope_scaling={kind: yarn, factor: 8, original_context: 64, beta_slow: 32}",
            "model.rope_scaling.beta_slow = 32 is not below beta_fast = 32",
        ),
        (
            "attention=mha model.qk_gain=true model.qk_norm=false",
            "model.qk_gain = true, and model.qk_norm = false leaves it no norm: set",
        ),
        ("attention=lrkv attention.rope=latent model.qkv_bias=true", "model.qkv_bias = true asks"),
        (
            "attention=lrkv attention.rope=latent model.qk_gain=true",
            "model.qk_gain = true asks for keys that are normed and rotated whole, and LRKV-46 "
            "rope latent has none: use mha",
        ),
        ("model.unroll=5", "model.unroll = 5 does not divide model.layers = 12: use 1 or 12"),
        (
            "train.grad_accum_steps=3",
            "train.grad_accum_steps = 3 does not divide train.global_batch_size = 16: use a",
        ),
        ("mesh.data=-1", "mesh.data and mesh.fsdp are both -1: only one axis can"),
        ("mesh.data=0", "mesh.data = 0: use a size from 1, or -1"),
        ("attention=lrvk", "attention = lrvk is not a variant: did you mean lrkv?"),
        ("attention=[1]", "attention = [1] is not a variant: use one of mha, gqa, mqa, mla, lrkv"),
        ("attention.kind=mhaa", "kind mhaa is unknown: did you mean mha?"),
        ("attention.kind=[1]", "kind [1] is unknown: use one of mha"),
        ("attention.kind=gqa", "unknown key attention.rank: use one of kv_heads"),
        ("variants.gqa={}", "variants.gqa.kv_heads is missing: give it a value"),
        ("variants.lrkv={}", "attention.rank is missing: give it a value"),
        ("variants={big: {kind: mha}}", "name one, as in variants.lrkv.rank=64"),
        ("variants.foo.rank=3", "variants.foo: kind foo is unknown: use one of mha, gqa"),
        ("variants=3", "variants = 3: name one"),
        ("variants.mha=3", "variants.mha = 3: write its settings as a mapping, {} for none"),
        ("model.attention.rank=3", "choose with attention=NAME and change with attention.KEY"),
        ("model=3", "model = 3 should be a valid dictionary"),
        ("train.seq_len.foo=3", "train.seq_len.foo: seq_len is a value, not a group of settings"),
        ("train.steps", "'train.steps' is not an override: write key=value, as in train.steps=100"),
        ("=3", "'=3' is not an override: write key=value"),
        ("data.source=[", "'data.source=[': the value is not YAML; quote it"),
        ("data={source: a, source: b}", "the value is not YAML"),
        ('run_dir="a\\0b"', r"run_dir = 'a\x00b' string should match"),
        ("train.seed=1" + "0" * 22, "000 should be less than 4294967296"),
        ("data.shuffle_seed=1e22", "data.shuffle_seed = 1e+22 should be a valid integer"),
        ("optimizer.grad_clip=1e400", "optimizer.grad_clip = inf should be a finite number"),
        ("optimizer.grad_clip=.nan", "optimizer.grad_clip = '.nan' should be a valid number"),
        ("train.steps=1" + "0" * 22, "train.steps = 1"),
        ("train.steps=10000000000", "a run of 10000000000 steps cannot be counted"),
        ("attention=gqa attention.kv_heads=4", "kv_heads = 4 does not divide heads = 6: use 1, 2,"),
        (
            "attention=gqa model.heads=7",
            "attention.kv_heads = 3 does not divide heads = 7: use 1 or",
        ),
        ("attention=gqa model.heads=1", "attention.kv_heads = 3 does not divide heads = 1: use 1"),
        ("attention=mla attention.qk_rope_head_dim=63", "use 62 or 64"),
        (
            "attention=mla attention.rope=full attention.qk_rope_head_dim=64",
            "leave qk_rope_head_dim out",
        ),
        (
            "attention=mla attention.kv_lora=4",
            "unknown key attention.kv_lora: did you mean kv_lora_rank?",
        ),
        ("attention=mha attention.rank=4", "unknown key attention.rank: there is nothing to set"),
    ],
)
def test_a_bad_override_is_named_with_its_mend(override, message):
    separate = override.split(" ") if override.startswith("attention=") else [override]
    assert message in complaint("128m", *separate)


def test_a_run_has_one_length(tmp_path):
    both = edited(tmp_path, lambda raw: raw["train"].update(steps=5))
    assert "train.steps, train.tokens and train.epochs: give exactly one" in complaint(both)
    assert load_config(both, ["train.steps=7"]).train.tokens is None
    assert "give exactly one" in complaint("128m", "train.steps=5", "train.tokens=9")
    assert "give exactly one" in complaint("128m", "train.tokens=null")


@pytest.mark.parametrize(
    ("path", "mend"),
    [
        ("128n", "did you mean 128m?"),
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
        ("a\nb: 3\n  c", "line 2"),
        ("\x00", "is not YAML"),
        ("", "is not a mapping of settings: see the files under configs/"),
        ("- 1", "is not a mapping of settings"),
        ("name: x", "lists no variants: give at least `variants: {mha: {}}`"),
        ("variants: [mha]", "lists no variants"),
        ("variants: {mha: {}}", "has no model"),
        ("variants: {mha: 3}", "variants.mha = 3: write its settings as a mapping"),
        ("variants: {mha: {kind: [2]}}", "kind [2] is unknown"),
        ("variants: {mha: {}}\nmodel: {}", "attention = None is not a variant: use one of mha"),
        ("variants: {mha: {}}\nmodel: {}\nattention: mha", "name is missing: give it a value"),
        ("train:\n  steps: 3\n  seed: 1\n  steps: 4", "steps stands twice, in lines 2 and 4"),
    ],
)
def test_a_file_that_is_no_configuration_is_told_why(text, message, tmp_path):
    assert message in complaint(write(tmp_path, text))


def test_bytes_that_are_no_text_are_not_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x80")
    assert f"{path} is not YAML: " in complaint(path)


def test_a_key_unknown_to_a_files_variant_names_the_line_and_the_nearest(tmp_path):
    path = edited(tmp_path, lambda raw: raw["variants"].update(big={"kind": "lrkv", "rnk": 64}))
    assert complaint(path) == "run.yaml: unknown key variants.big.rnk: did you mean rank?"
    assert complaint(path, "attention=big") == (
        "run.yaml: unknown key attention.rnk: did you mean rank?"
    )


def test_attention_written_under_model_is_refused_not_ignored(tmp_path):
    path = edited(tmp_path, lambda raw: raw["model"].update(attention={"kind": "lrkv", "rank": 5}))
    assert "choose with attention=NAME" in complaint(path)


@settings(max_examples=40, deadline=None)
@given(
    key=st.lists(
        st.sampled_from(["model", "train", "attention", "variants", "mla", "muon", "optimizer"])
        | st.sampled_from(["layers", "rank", "kind", "steps", "sample_prompts", "zz"]),
        min_size=1,
        max_size=4,
    ).map(".".join),
    value=texts | st.sampled_from(["null", "3", "-1", "{}", "[]", "{a: {b: [1]}}", "{kind: mla}"]),
)
def test_no_override_whatever_ends_in_anything_but_a_config_or_one_line(key, value):
    try:
        load_config("128m", [f"{key}={value}"])
    except LrkvError as error:
        assert not re.search(r"[\r\n]", str(error))


# Loading changes nothing but what it is asked to.


def test_lrkv_is_the_papers_model_and_lrkv_latent_beside_it_is_ours():
    assert LRKV(rank=8).mode == "full"  # one default, wherever a mode is left out
    for scale in SCALES:
        config = load_config(scale)
        assert config.attention == ("lrkv_latent" if scale == "quickstart" else "lrkv")
        paper, ours = config.variants["lrkv"], config.variants["lrkv_latent"]
        assert (ours.mode, paper.mode) == ("latent", "full")
        assert ours.rank == paper.rank + paper.rank % 2  # every coordinate has its pair
        assert config.variants["mha"] == MHA()
        assert list(config.variants) == VARIANTS


@pytest.mark.parametrize("scale", ["128m", "2.5b"])
def test_midtraining_takes_over_the_run_that_it_starts_from(scale, tmp_path):
    run = load_config(scale, ["attention=mla"])
    (tmp_path / "config.yaml").write_text(dump_config(run))
    mid = load_config("configs/midtrain.yaml", [f"init_from={tmp_path}"])
    assert mid.model == run.model and mid.attention == "mla" and mid.variants == run.variants
    assert mid.name == f"{scale}-midtrain" and mid.directory == f"runs/{scale}-midtrain-mla"
    assert mid.train.global_batch_size * mid.train.seq_len == 524_288 and mid.train.epochs == 1
    assert mid.data.tokenizer == run.data.tokenizer and mid.data.mixture.loss == "all"
    assert [part.first for part in mid.data.mixture.heldout] == [24_000, 5_200, 420]
    assert mid.optimizer.matrix_lr == run.optimizer.matrix_lr
    assert (mid.optimizer.schedule, mid.optimizer.warmup_steps, mid.optimizer.constant) == (
        "linear", 0, 0.8,
    )  # fmt: skip
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
    (tmp_path / "third.yaml").write_text("extends: mine\n")
    with pytest.raises(LrkvError, match="extends mine, which extends another"):
        load_config(tmp_path / "third.yaml")
    (tmp_path / "third.yaml").write_text("extends: quickstrat\n")
    with pytest.raises(LrkvError, match="did you mean quickstart"):
        load_config(tmp_path / "third.yaml")
    for odd in ("[1]", "''", "x" * 300, "null"):
        (tmp_path / "third.yaml").write_text(f"extends: {odd}\n")
        with pytest.raises(LrkvError, match="name a file beside it"):
            load_config(tmp_path / "third.yaml")


@pytest.mark.parametrize("setting", ["attention.rope", "variants.mla.rope"])
def test_another_mode_of_mla_needs_no_word_on_the_file_s_rope_width(setting):
    assert load_config("nano", ["attention=mla"]).model.attention.qk_rope_head_dim == 16
    chosen = load_config("nano", ["attention=mla", f"{setting}=full"]).model.attention
    assert (chosen.rope, chosen.qk_rope_head_dim) == ("full", 0)


def test_settings_of_earlier_versions_are_read():
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
