"""Exported runs in vLLM: the plugin's own tests, on folders that this library writes.

Needs the interpreter of LRKV_VLLM_PYTHON, with vLLM and `integrations/vllm` installed; `.ci/run
vllm` makes one.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.planted_models import plant

from lrkv_jax.inference import Engine, Sampling
from lrkv_jax.interop.export import export
from lrkv_jax.training.restore import load_run

pytestmark = pytest.mark.vllm
PLUGIN = Path(__file__).parents[2] / "integrations/vllm"
LONG = ("train.seq_len=256",)
FULL = "attention=lrkv"
CASES = {
    "full": (FULL, "attention.rank=3"),
    "shared": ("attention.rope=shared", "attention.kv_heads=2"),
    "latent": ("attention.rank_value=5", "model.tied_head=true"),
}


def asked_and_answered(run, prompts, tokens):
    """Prompts and the greedy tokens that the engine gives them, whatever the stop tokens."""
    engine = Engine(run, batch=8, length=max(map(len, prompts)) + tokens)
    return {"prompts": prompts, "tokens": engine.generate(prompts, tokens, sampling=Sampling(temperature=0))}


def ragged(vocabulary, number, longest, seed=0):
    """Prompts of many lengths, half of which begin alike."""
    random = np.random.RandomState(seed)
    shared = random.randint(0, vocabulary, longest // 2).tolist()
    lengths = random.randint(1, longest // 2, number)
    prompts = [random.randint(0, vocabulary, length).tolist() for length in lengths]
    return [shared + prompt if i % 2 else prompt for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each case's export, and beside it what the run says of ragged prompts."""
    folder = tmp_path_factory.mktemp("exported")
    for name, settings in CASES.items():
        plant(folder / f"{name}.run", *LONG, *settings)
        export(folder / f"{name}.run", folder / name, factored=True)
        run = load_run(folder / f"{name}.run")
        number, tokens = (50, 100) if name == "full" else (6, 20)
        said = asked_and_answered(run, ragged(run.config.model.vocabulary, number, 120), tokens)
        (folder / f"{name}.json").write_text(json.dumps(said))
    return folder


def test_the_plugins_tests_pass_on_folders_that_were_just_exported(folders):
    python = os.environ.get("LRKV_VLLM_PYTHON")
    if python is None:
        pytest.skip("LRKV_VLLM_PYTHON names no interpreter with vLLM")
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    alone = os.environ | quiet | {"LRKV_VLLM_FOLDERS": str(folders)}
    done = subprocess.run([python, "-m", "pytest", "-q", "tests"], cwd=PLUGIN, env=alone)
    assert done.returncode == 0
