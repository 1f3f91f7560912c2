"""Unmodified vLLM serves LRKV with the joint norm from DeepSeek's small cache.

LRKV_DEEPSEEK_FOLDER names what tests/interop/deepseek_folder.py made: an export, and beside it the
texts that lrkv_jax continues prompts with. Nothing of this plugin is used here.
"""

import json
import os

import pytest

FOLDER = os.environ.get("LRKV_DEEPSEEK_FOLDER")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="LRKV_DEEPSEEK_FOLDER names no folder")
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@pytest.fixture(scope="module")
def expected():
    with open(f"{FOLDER}.json") as file:
        return json.load(file)


@pytest.fixture(scope="module")
def llm(expected):
    from vllm import LLM

    # Compiling, the default, takes minutes. The CPU's rotary_embedding of vLLM 0.32, which eager
    # mode alone uses, takes queries [T, H, K] for [T, H · K], and is left out.
    return LLM(
        FOLDER, dtype="float32", max_model_len=expected["length"], max_num_seqs=4,
        kv_cache_memory_bytes=8 << 20, enforce_eager=True,
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
    )  # fmt: skip


def test_greedy_text_is_lrkv_jaxs(llm, expected):
    from vllm import SamplingParams

    new = len(expected["ids"][0])
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in expected["prompts"]]
    found = [one.outputs[0] for one in llm.generate(prompts, sampling, use_tqdm=False)]
    assert sum(map(len, expected["ids"])) >= 2000
    assert [list(one.token_ids) for one in found] == expected["ids"]
    assert [one.text for one in found] == expected["texts"]


def test_a_layer_caches_the_latent_and_the_rope_key_alone(llm, expected):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    (specs,) = llm.collective_rpc("get_kv_cache_spec")
    assert len(specs) == expected["layers"]
    for spec in specs.values():
        assert spec.page_size_bytes / spec.block_size == 4 * expected["cached_values"] == 4 * 576
    mha = FullAttentionSpec(
        block_size=16, num_kv_heads=expected["heads"], head_size=expected["head_width"],
        dtype=torch.float32,
    )  # fmt: skip
    assert mha.page_size_bytes / 16 == 4 * 2 * 14 * 64
