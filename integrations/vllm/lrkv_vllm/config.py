"""What a factored export says of its model, and what of vLLM's settings fits it.

All of it is checked before anything is allocated; each error is one line.
"""

from transformers import PretrainedConfig

# Fields that `lrkv export --as factored` alone writes, for each kind of attention.
FIELDS = {
    "lrkv": ("rope_mode", "key_frequencies", "logit_scale", "rank_key", "rank_value"),
    "mla": ("rope_mode", "key_frequencies", "logit_scale", "rank_latent", "rank_private"),
}
DTYPES = ("float32", "bfloat16")
SLOTS = 16  # a page holds a multiple of these


class LrkvConfig(PretrainedConfig):
    """The config.json of a factored export."""

    model_type = "lrkv"
    # What exports wrote before there were others.
    attention_kind, qk_gain, qkv_bias = "lrkv", False, False


class Checks:
    """vLLM's hook for the settings of an architecture."""

    @staticmethod
    def verify_and_update_model_config(model_config) -> None:
        """Raise `ValueError` for a folder that is no factored export."""
        config = model_config.hf_config
        kind = config.attention_kind
        wrong = [name for name in FIELDS.get(kind, ()) if not hasattr(config, name)]
        if kind not in FIELDS or wrong:
            what = f"no {wrong[0]}" if wrong else f"attention_kind = {kind!r}"
            raise ValueError(
                f"{model_config.model}: config.json has {what}, so it is no factored export: "
                "write it with `lrkv export RUN FOLDER --as factored`"
            )

    @staticmethod
    def verify_and_update_config(vllm_config) -> None:
        """Raise `ValueError` for a setting that the layers here do not have."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        parallel, config = vllm_config.parallel_config, model.hf_config
        dtype = str(model.dtype).removeprefix("torch.")
        workers = parallel.tensor_parallel_size
        split = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        whole = [name for name in split if getattr(config, name) % workers]
        typed, fits = cache.cache_dtype in ("auto", dtype), cache.block_size % SLOTS == 0
        leave = "leave it out"
        right = {
            f"--dtype {dtype}": (dtype in DTYPES, f"use {' or '.join(DTYPES)}"),
            f"--kv-cache-dtype {cache.cache_dtype}": (typed, leave),
            f"--block-size {cache.block_size}": (fits, f"use a multiple of {SLOTS}"),
            f"--tensor-parallel-size {workers}": (not whole, f"use a divisor of the {whole}"),
            "--pipeline-parallel-size": (parallel.pipeline_parallel_size == 1, leave),
            "--decode-context-parallel-size": (parallel.decode_context_parallel_size == 1, leave),
            "--quantization": (not model.quantization, leave),
            "--enable-lora": (not vllm_config.lora_config, leave),
            "--speculative-config": (not vllm_config.speculative_config, leave),
            "--hf-overrides": (not model.hf_overrides, leave),
        }
        for option, (is_right, fix) in right.items():
            if not is_right:
                raise ValueError(f"{option} does not fit this model of LRKV: {fix}")
        # Nothing here is compiled or captured in CUDA graphs yet.
        model.enforce_eager = True
