"""Exported runs over HTTP. LRKV_VLLM_FOLDERS holds NAME, an export, and NAME.json, what its run
says: greedy tokens of prompts. `export_runs.py` makes them, in lrkv_jax's environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers import completed, label, metric, served

FOLDERS = Path(os.environ.get("LRKV_VLLM_FOLDERS", "none"))
NAMES = sorted(path.stem for path in FOLDERS.glob("*.json"))
pytestmark = pytest.mark.skipif(not NAMES, reason="LRKV_VLLM_FOLDERS names no folder of exports")


def said(name):
    found = json.loads((FOLDERS / f"{name}.json").read_text())
    return found["prompts"], found["tokens"]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("full", "deepseek")])
def test_each_variant_says_what_its_run_says(name):
    prompts, tokens = said(name)
    with served(FOLDERS / name, "--kv-cache-memory-bytes", "16777216") as address:
        assert completed(address, prompts, len(tokens[0])) == tokens


def test_many_requests_in_a_small_pool_say_what_the_run_says():
    """Prompts in pieces, shared prefixes, and requests that lose their pages and come again."""
    prompts, tokens = said("full")
    options = (
        "--kv-cache-memory-bytes", "700000", "--block-size", "16", "--max-num-seqs", "16",
        "--max-num-batched-tokens", "64",
    )  # fmt: skip
    with served(FOLDERS / "full", *options) as address:
        assert completed(address, prompts, len(tokens[0])) == tokens
        assert metric(address, "vllm:num_preemptions_total") > 0
        assert metric(address, "vllm:prefix_cache_hits_total") > 0


def test_two_workers_with_half_the_heads_each_say_the_same():
    prompts, tokens = said("full")
    options = ("--kv-cache-memory-bytes", "16777216", "--tensor-parallel-size", "2")
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # a CPU has one memory here
    with served(FOLDERS / "full", *options, **binding) as address:
        assert completed(address, prompts[:4], 30) == [some[:30] for some in tokens[:4]]


def test_unmodified_vllm_serves_deepseeks_geometry_from_576_values():
    """Without this plugin: `lrkv export --as deepseek` is a model that vLLM has."""
    prompts, tokens = said("deepseek")
    # Compiling, the default, takes minutes. In eager mode the rotation of vLLM 0.32 on a CPU takes
    # queries [T, H, K] for [T, H · K], and is left out.
    options = (
        "--kv-cache-memory-bytes", "8388608", "--max-model-len", "256", "--enforce-eager",
        "--compilation-config", '{"custom_ops": ["all", "-rotary_embedding"]}',
    )  # fmt: skip
    with served(FOLDERS / "deepseek", *options, VLLM_PLUGINS="none") as address:
        assert completed(address, prompts, len(tokens[0])) == tokens
        assert sum(map(len, tokens)) >= 2000
        pages = label(address, "vllm:cache_config_info", "num_gpu_blocks")
    # Two layers, pages of 16 tokens, float32: 512 + 64 values.
    assert pages == 8388608 // (2 * 16 * 4 * 576)


def test_the_benchmark_measures_a_folder():
    script = Path(__file__).parents[1] / "bench_serve.py"
    small = ("--requests", "4", "--input", "16", "--output", "8", "--bytes", "2000000")
    command = [sys.executable, script, f"latent={FOLDERS / 'latent'}", *small]
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = dict(line.rsplit("  latent ", 1) for line in table.splitlines())
    assert len(rows) == 6 and float(rows["output tokens per second".ljust(36)]) > 0
