"""Exported runs in transformers: the same logits, the same greedy text, and the cache's bytes.

Needs an interpreter with torch and transformers: LRKV_TORCH_PYTHON, or this one.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.planted_models import IDS, LLAMA, plant
from support.torch_python import torch_python

from lrkv_jax.accounting.counts import cache_bytes_per_token
from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.conversation import conversation_from
from lrkv_jax.decode import Sampling
from lrkv_jax.interop.export import export
from lrkv_jax.run.restore import load_run

pytestmark = pytest.mark.torch

BIASES, FULL = "model.qkv_bias=true", "attention=lrkv_full"
CASES = {
    "mha": ("NanoChatForCausalLM", "attention=mha"),
    "gqa-chat": ("NanoChatForCausalLM", "attention=gqa", "model.vocabulary=4224"),
    "mqa-llama": ("LlamaForCausalLM", "attention=mqa", "model.tied_head=true", *LLAMA),
    "mha-qwen3": ("Qwen3ForCausalLM", "attention=mha", *LLAMA, "model.qk_norm=true", BIASES),
    "gqa-arcee": ("ArceeForCausalLM", "attention=gqa", *LLAMA, "model.gated=false"),
    "gqa-llama": ("LlamaForCausalLM", "attention=gqa", *LLAMA, BIASES),
    "lrkv": ("NanoChatForCausalLM", FULL, "attention.rank=3"),
    "lrkv-groups-llama": ("LlamaForCausalLM", FULL, "attention.kv_heads=2", *LLAMA),
    "factored-full": ("LrkvForCausalLM", FULL, "attention.rank=3"),
    "factored-shared": ("LrkvForCausalLM", "attention.rope=shared", "attention.kv_heads=2"),
    "factored-latent": ("LrkvForCausalLM", "attention.rank_value=5"),
    "factored-tied": ("LrkvForCausalLM", "attention.tied=true", *LLAMA),
}
SAID = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"},
]  # fmt: skip


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """Each case's run, and what transformers says of its export."""
    python, folder = torch_python(), tmp_path_factory.mktemp("exported")
    for name, (_, *settings) in CASES.items():
        plant(folder / f"{name}.run", *settings)
        export(folder / f"{name}.run", folder / name, factored=name.startswith("factored"))
    script, out = Path(__file__).parent / "reload.py", folder / "out.json"
    command = [python, script, out, json.dumps(IDS), *(folder / name for name in CASES)]
    subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    found = json.loads(out.read_text())
    return {n: (load_run(folder / f"{n}.run"), found[str(folder / n)]) for n in CASES}


@pytest.mark.parametrize("case", CASES)
def test_transformers_gives_the_run_its_logits_text_and_cache(case, reloaded):
    run, theirs = reloaded[case]
    assert theirs["class"] == CASES[case][0] and not theirs["wrong"]
    np.testing.assert_allclose(theirs["logits"], run.model(IDS), rtol=0, atol=1e-5)
    prompt = "The state of the union"
    assert theirs["prompt"] == run.ids(prompt)
    assert theirs["text"] == run.generate(prompt, 24, sampling=Sampling(temperature=0))
    model = run.config.model
    whole = 8 * model.layers * model.attention.key_heads(model) * model.head_width
    factored = cache_bytes_per_token(model, 4)
    expected = factored if case.startswith("factored") else whole
    assert theirs["cache_bytes_per_token"] == expected
    if model.vocabulary > run.tokenizer.vocabulary:
        ids = ChatFormat(run.tokenizer).prompt(conversation_from(SAID))
        assert theirs["chat"] == ids
