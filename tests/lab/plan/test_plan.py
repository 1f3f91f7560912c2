"""`lrkv plan`: the JSON people script against, and the table people read."""

import subprocess
import sys

import pytest

from lrkv_jax.config import load_config
from lrkv_jax.lab.plan.report import as_text, plan_report

VARIANTS = ["mha", "gqa", "mqa", "mla", "lrkv", "lrkv_latent", "lrkv_deepseek"]


def planned(config, names=None, **options):
    return plan_report(config, names or list(config.variants), **options)


def test_json_describes_the_run_and_every_variant():
    plan = planned(load_config("128m"))
    variants = plan.pop("variants")
    assert plan.pop("hardware")["name"] == "H200 SXM"
    assert plan == {
        "name": "128m", "layers": 12, "width": 768, "heads": 6, "head_width": 128,
        "vocabulary": 50304, "context": 2048, "tokens": 100_000_000_000, "cache_dtype": "bfloat16",
            "layers_pattern": None, "window": None,
    }  # fmt: skip
    assert list(variants) == VARIANTS
    # The choice changes no variant's figures.
    chosen = load_config("128m", ["attention=mla"])
    assert planned(chosen, ["mla"])["variants"] == {"mla": variants["mla"]}


def test_mha_is_the_reference_even_where_the_yaml_lists_none(tmp_path):
    path = tmp_path / "no_mha.yaml"
    path.write_text("extends: 128m\nvariants: {lrkv: {rank: 46}, half: {kind: gqa, kv_heads: 3}}\n")
    variants = planned(load_config(path))["variants"]
    assert list(variants) == ["lrkv", "half"]
    assert variants["half"]["kv_cache_fraction_of_mha"] == 0.5
    assert variants["half"]["kv_cache_allocated_fraction_of_mha"] == 0.5
    assert variants["lrkv"]["kv_cache_fraction_of_mha"] == pytest.approx(0.526, abs=5e-4)


def test_the_table_has_the_paper_s_largest_model():
    step = planned(load_config("nano", ["mesh.fsdp=2"]), training=True)
    assert max(map(len, as_text(step).splitlines())) <= 80
    largest = planned(load_config("6.3b"))
    lines = as_text(largest).splitlines()
    shown = as_text(step), as_text(largest, decoding=True), as_text(largest)
    assert ["Decoding on one" in text for text in shown] == [True, True, False]
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith(tuple(VARIANTS))}
    assert list(rows) == VARIANTS[:-1]
    paper = ["6.28B", "1.57B", "500.7M", "39.674", "241,664", "249,856", "47.7", "45.3"]
    assert rows["lrkv"] == paper and rows["mla"][-2:] == ["13.3", "12.5"]


def test_counts_need_no_jax():
    code = """
import sys
from lrkv_jax.lab.plan.report import as_text, plan_report
from lrkv_jax.config import load_config
config = load_config("6.3b")
as_text(plan_report(config, list(config.variants), device="h100"))
assert not {"jax", "jaxlib", "flax", "optax", "grain", "matplotlib"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
