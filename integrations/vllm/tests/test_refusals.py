"""What does not fit is refused in one line, before anything is allocated."""

import json
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from lrkv_vllm import decode_kernel, register
from lrkv_vllm.config import LrkvConfig
from lrkv_vllm.model import LrkvForCausalLM
from lrkv_vllm.weights import load, weight
from test_attention import CASES, LRKV, layer_of

CONFIG = dict(
    architectures=["LrkvForCausalLM"], model_type="lrkv", attention_kind="lrkv", hidden_size=64,
    num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_hidden_layers=1,
    intermediate_size=128, vocab_size=256, max_position_embeddings=256, rms_norm_eps=1e-6,
    hidden_act="relu2", gated=False, qk_norm=True, norm_gain=False, embedding_norm=True,
    tied_head=False, final_logit_softcapping=15.0, key_frequencies=[1.0] * 8, logit_scale=0.25,
    rope_mode="full", rank_key=8, rank_value=8, latent_frequencies=[1.0] * 4, dtype="float32",
)  # fmt: skip
REFUSED = {
    "no factored export": ({"rope_mode": None}, {}, "no factored export: write it with"),
    "another kind": ({"attention_kind": "gqa"}, {}, "attention_kind = 'gqa'"),
    "dtype": ({}, {"dtype": "float16"}, "--dtype float16"),
    "cache's dtype": ({}, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    "pages": ({}, {"block_size": 24}, "--block-size 24"),
    "groups": ({"num_key_value_heads": 2}, {"tensor_parallel_size": 4}, "num_key_value_heads"),
    "pipeline": ({}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    "quantization": ({}, {"quantization": "fp8"}, "--quantization"),
    "lora": ({}, {"enable_lora": True}, "--enable-lora"),
    "angles": ({}, {"hf_overrides": {"rope_theta": 1e6}}, "--hf-overrides"),
}


def refusal(folder, changes, options):
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as error:
        EngineArgs(model=str(folder), skip_tokenizer_init=True, **options).create_engine_config()
    return next(line for line in str(error.value).splitlines() if ": " in line)


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_are_named_with_the_fix(case, tmp_path):
    changes, options, named = REFUSED[case]
    line = refusal(tmp_path, changes, options)
    assert named in line and ": " in line


def test_another_vllm_is_refused(monkeypatch, caplog):
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    monkeypatch.setattr(vllm.ModelRegistry, "models", {})
    register()
    (record,) = caplog.records
    assert "tested with vLLM 0.32 and this is 0.33.1" in record.getMessage()
    assert not vllm.ModelRegistry.models


def test_weights_of_another_shape_are_refused(monkeypatch):
    layer_of(LRKV, monkeypatch)  # one worker
    with pytest.raises(ValueError, match=r"query is \[2, 3\] .* \[3, 2\]"):
        load("query", weight(3, 2), torch.zeros(2, 3))


def test_the_kernel_is_taken_only_if_it_agrees_with_pytorch(monkeypatch, caplog):
    layer, kernel, grids = layer_of(CASES["latent, odd"], monkeypatch), decode_kernel._decode, []

    class Launched:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(decode_kernel, "_decode", Launched())
    assert decode_kernel.checked(layer) is decode_kernel.decode
    assert not caplog.records and grids == [(2, 2, 2)]  # requests, groups, runs to be joined
    monkeypatch.setattr(decode_kernel, "decode", lambda *args: 1.01 * layer.attend(*args[1:]))
    assert decode_kernel.checked(layer) is None


def test_weights_that_no_file_has_are_prepared_as_well(monkeypatch):
    """Of `--load-format dummy`: vLLM draws them, and calls no `load_weights`."""
    layer_of(LRKV, monkeypatch)  # one worker
    config = LrkvConfig(**CONFIG | {"num_hidden_layers": 2})
    model_config = SimpleNamespace(
        hf_config=config, dtype=torch.float32, max_model_len=256, quantization=None,
        word_embeddings_untied_by_checkpoint=False,
    )  # fmt: skip
    forwards = SimpleNamespace(static_forward_context={})
    vllm_config = SimpleNamespace(model_config=model_config, compilation_config=forwards)
    model = LrkvForCausalLM(vllm_config=vllm_config)
    process_weights_after_loading(model, model_config, torch.device("cpu"))
    first, second = (block.attention for block in model.blocks)
    assert first.input.shape == second.input.shape == (64, 4 * 16 + 2 * (16 + 4 * 8))
    assert first.turns is second.turns  # a table of 64 MiB at 131,072 positions
