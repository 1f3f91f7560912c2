"""Every setting has one role and one description; lists and comparisons follow from them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lrkv_jax.config import load_config
from lrkv_jax.config.attention import variants
from lrkv_jax.config.differences import differences
from lrkv_jax.config.frozen import ROLES, walk
from lrkv_jax.config.load import as_settings, config_from
from lrkv_jax.config.reference import all_settings, as_markdown, as_text
from lrkv_jax.errors import LrkvError

# As a run saves it, which has filled in the steps.
FILLED_IN = as_settings(load_config("128m", ["train.epochs=2"]))
FILLED_IN["train"]["steps"] = 9
HUB = "data.hub={repo: a/b}"
TALK = "data.mixture={train: [{task: t, split: s}], heldout: [{task: t, split: s}]}"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ([], ["train.global_batch_size=8"], "train.global_batch_size: 16 there, 8 asked for"),
        (["attention=mha"], [], "model.attention: kind='mha' rope='full' there"),
        ([], ["attention.rank=8"], "model.attention: kind='lrkv' rank=46"),
        (["train.steps=64"], ["train.tokens=2097152"], None),
        (FILLED_IN, ["train.epochs=2"], None),
        (["model.dtype=bfloat16"], [], None),
        (["model.dtype=bfloat16"], ["model.dtype=float32"], "model.dtype: bfloat16 there"),
        ([], [TALK], "data.mixture.train: None there"),
        ([TALK], [f"{TALK[:-1]}, loss: assistant}}"], "data.mixture.loss: all there, assistant"),
        ([], [HUB, "data.workers=3", "mesh.data=2", "model.unroll=2", "run_dir=elsewhere"], None),
        ([], ["train.save_every=7", "train.grad_accum_steps=2", "train.loss_chunk=64"], None),
        ([], ["data.source=elsewhere"], "data.source: data/fineweb-edu there, elsewhere asked for"),
    ],
)  # fmt: skip
def test_what_makes_another_run_is_said_by_its_key(before, after, said):
    saved = config_from(before, "saved") if before is FILLED_IN else load_config("128m", before)
    changes = differences(saved, load_config("128m", after))
    assert (str(changes[0]) if changes else None) is said or str(changes[0]).startswith(said)


@pytest.mark.parametrize(
    "change", ["kv_cache_dtype=int8", "decode_kernel=xla", "train_kernel=chunked"]
)
def test_auto_that_no_start_replaces_is_a_value(change):
    (found,) = differences(load_config("128m"), load_config("128m", [f"model.{change}"]), ROLES)
    assert f"{found.key}={found.new}" == f"model.{change}" and found.old == "auto"


def test_the_list_and_the_page_have_every_setting_with_its_role_and_description():
    """To mend the page: lrkv settings --markdown > docs/settings.md."""
    page = Path(__file__).parents[2] / "docs/settings.md"
    assert page.read_text() == as_markdown()
    config, everything = load_config("128m"), all_settings()
    assert {role for _, role, _ in [*walk(config), *walk(config.data.hub)]} == set(ROLES)
    assert all(one.meaning.endswith(".") for one in everything)
    keys = [setting.key for setting in everything]
    known = {key for key, _, _ in walk(config)} - {"model.attention"}
    assert known <= set(keys) and len(known) > 80
    # Two variants may have settings of one name; each says whose it is.
    assert len({(setting.key, setting.meaning) for setting in everything}) == len(keys)
    for entry in variants().values():
        assert {f"attention.{n}" for n in entry.model_fields if n != "kind"} <= set(keys)
    assert [s.key for s in all_settings("optimizer.muon.")][0] == "optimizer.muon.momentum"
    assert [s.default for s in all_settings("train.max_checkpoints")] == ["2"]
    text = as_text(everything, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert all(set(setting.meaning.split()) <= set(text.split()) for setting in everything)
    with pytest.raises(LrkvError, match="no setting train.seq_lem: did you mean train.seq_len"):
        all_settings("train.seq_lem")
    with pytest.raises(LrkvError, match="no setting 128m: use one of .*optimizer"):
        all_settings("128m")


@pytest.mark.parametrize("verb", ["train", "sweep"])
def test_a_typo_is_named_before_anything_heavy_is_imported(verb):
    """It took 3.3 CPU seconds, since the loop was imported first."""
    # Python lists what it imports on the same stream.
    command = [sys.executable, "-X", "importtime", "-m", "lrkv_jax.cli", verb]
    ended = subprocess.run([*command, "quickstart", "typo=1"], capture_output=True, text=True)
    assert ended.returncode == 2 and "unknown key typo" in ended.stderr
    imported = set(re.findall(r"\| +(\S+)$", ended.stderr, re.MULTILINE))
    assert "lrkv_jax.config.load" in imported and imported.isdisjoint({"jax", "flax", "numpy"})
