"""`lrkv plan`: the JSON people script against, the table people read, and how soon they have it."""

import json
import os
import subprocess
import sys
import time

import pytest
import yaml
from rich.console import Console

from lrkv_jax.config import find_config, load_config
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.plan import show
from lrkv_jax.lab.plan.report import PlanOptions, report
from lrkv_jax.lab.plan.show import print_plan

KEYS = {
    "parameters",
    "attention_parameters",
    "kv_parameters",
    "flops_per_token",
    "training_exaflops",
    "kv_cache_values_per_token",
    "kv_cache_bytes_per_token",
    "kv_cache_allocated_bytes_per_token",
    "kv_cache_live_bytes_per_token",
    "kv_cache_live_fraction_of_mha",
    "kv_cache_fraction_of_mha",
    "kv_cache_bytes_fraction_of_mha",
    "kv_cache_fraction_published",
    "decode",
}
VARIANTS = ["mha", "gqa", "mqa", "mla", "lrkv", "lrkv_latent"]


def planned(capsys, config, *, all_variants=True):
    print_plan(config, all_variants=all_variants, as_json=True)
    return json.loads(capsys.readouterr().out)


def test_json_describes_the_run_and_every_variant(capsys):
    plan = planned(capsys, load_config("128m"))
    variants = plan.pop("variants")
    assert plan.pop("hardware")["name"] == "H200 SXM"
    assert plan == {
        "name": "128m",
        "layers": 12,
        "width": 768,
        "heads": 6,
        "head_width": 128,
        "vocabulary": 50304,
        "context": 2048,
        "tokens": 100_000_000_000,
        "cache_dtype": "bfloat16",
    }
    assert list(variants) == VARIANTS
    for costs in variants.values():
        assert set(costs) == KEYS
        measured = {"training_exaflops", "kv_cache_live_bytes_per_token", "decode"}
        counts = [key for key in KEYS - measured if "fraction" not in key]
        assert all(type(costs[key]) is int for key in counts)


def test_without_all_the_plan_is_of_the_chosen_variant(capsys):
    config = load_config("128m", ["attention=mla"])
    alone = planned(capsys, config, all_variants=False)["variants"]
    assert list(alone) == ["mla"]
    # The choice changes no line's figures.
    assert planned(capsys, config) == planned(capsys, load_config("128m"))
    assert alone["mla"] == planned(capsys, config)["variants"]["mla"]


def test_mha_is_the_reference_even_where_the_yaml_lists_none(capsys, tmp_path):
    raw = yaml.safe_load(find_config("128m").read_text())
    raw["variants"] = {"lrkv": {"rank": 46}, "half": {"kind": "gqa", "kv_heads": 3}}
    path = tmp_path / "no_mha.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    variants = planned(capsys, load_config(path))["variants"]
    assert list(variants) == ["lrkv", "half"]
    assert variants["half"]["kv_cache_fraction_of_mha"] == 0.5
    assert variants["half"]["kv_cache_live_fraction_of_mha"] == 0.5
    assert variants["lrkv"]["kv_cache_fraction_of_mha"] == pytest.approx(0.526, abs=5e-4)


def test_a_line_that_cannot_have_the_shape_is_named_in_one_line(capsys):
    config = load_config("128m", ["model.heads=7"])  # sound for the chosen lrkv, not for gqa
    planned(capsys, config, all_variants=False)
    with pytest.raises(LrkvError, match=r"^attention.kv_heads = 3 .* heads = 7: use 1 or 7$"):
        print_plan(config, all_variants=True, as_json=True)


def test_table_fits_a_terminal_and_says_what_it_counts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_plan(load_config("6.3b"), all_variants=True, as_json=False)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    rows = [
        line.split() for line in out.splitlines() if line.split()[:1] in [[v] for v in VARIANTS]
    ]
    assert [row[0] for row in rows] == VARIANTS
    paper = ["6.28B", "1.57B", "500.7M", "39.674", "241,664", "249,856", "47.7", "45.3"]
    assert rows[-2] == ["lrkv", *paper]
    assert rows[3][-2:] == ["13.3", "12.5"]
    words = " ".join(out.split())
    for said in ("embedding and head", "not its causal half", "float32 inverse norms", "rope key"):
        assert said in words
    assert "padding included" in words


@pytest.mark.parametrize("fits", [True, False])
def test_time_is_an_assumption_and_there_is_none_of_a_step_that_does_not_fit(capsys, fits):
    config = load_config("quickstart", ["mesh.fsdp=1"])
    planned = report(config, ["lrkv"], PlanOptions(training=True))
    planned["training"]["verdict"]["fits"] = fits
    assert planned["training"]["compiled"] is None  # it is estimated, and says so
    show._print_training(Console(width=200), planned)
    out = capsys.readouterr().out
    assert ("not measured: " in out) == fits
    assert ("hours" in out and "MFU" in out) == fits
    assert "Memory of one device, GB, estimated" in out and "by the estimate" in out
    assert ("No time is estimated of a step that does not fit." in out) != fits


def test_names_with_brackets_are_printed_as_they_are(capsys, tmp_path):
    raw = yaml.safe_load(find_config("quickstart").read_text())
    raw["name"], raw["variants"], raw["attention"] = "[b]run", {"[red]": {"kind": "mha"}}, "[red]"
    path = tmp_path / "brackets.yaml"
    path.write_text(yaml.safe_dump(raw))
    print_plan(load_config(path), all_variants=True, as_json=False)
    out = capsys.readouterr().out
    assert "[b]run" in out and "[red]" in out


def test_what_is_measured_is_live_buffers_and_no_weight(monkeypatch):
    """The bytes follow what `init_cache` really makes, not the formula."""
    import jax
    import jax.numpy as jnp

    from lrkv_jax.lab.plan.live_cache import LIVE_SLOTS, live_cache_bytes_per_token
    from lrkv_jax.models.attention.base import Attention

    made = []

    def roomy(self, batch, length, dtype):
        made.append((batch, length, dtype))
        # An abstract layer has shapes where its weights would be.
        assert isinstance(self.query.get_value(), jax.ShapeDtypeStruct)
        return {"k": jnp.zeros((batch, length, 5), dtype), "spare": jnp.zeros(3, jnp.int8)}

    monkeypatch.setattr(Attention, "init_cache", roomy)
    config = load_config("6.3b", ["attention=mha"])
    per_token = live_cache_bytes_per_token(config.model, "float32")
    assert made == [(1, LIVE_SLOTS, jnp.float32)]
    assert per_token == 32 * (5 * 4 + 3 / LIVE_SLOTS)


def test_counts_need_no_jax():
    code = """
import sys
import lrkv_jax.lab.plan.step_time
from lrkv_jax.models.accounting.counts import plan
from lrkv_jax.models.accounting.serving import serving
from lrkv_jax.config import load_config
from lrkv_jax.distributed.hardware import hardware
config = load_config("6.3b")
plan(config, list(config.variants))
serving(config.model, hardware("h100"), 2048)
print(sorted({"jax", "jaxlib", "flax", "numpy", "optax", "grain"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_plan_answers_in_seconds_and_starts_no_accelerator():
    command = [sys.executable, "-m", "lrkv_jax.cli", "plan", "configs/6.3b.yaml", "--all"]
    # No platform is chosen here: the command chooses for itself.
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    assert "lrkv" in done.stdout
    # 2.2 s by itself, 1.3 of them loading JAX; the bound leaves room for a busy machine.
    assert seconds < 12
