"""What a factored export says of its model, and what of vLLM's settings fits it.

All of it is checked before anything is allocated; each error is one line.
"""

from transformers import PretrainedConfig

from lrkv_vllm import TESTED

# The fields that `lrkv export --factored` writes for each kind of attention.
COMMON = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "intermediate_size", "vocab_size", "rms_norm_eps", "hidden_act", "gated", "qk_norm",
    "norm_gain", "embedding_norm", "tied_head", "final_logit_softcapping", "key_frequencies",
    "logit_scale", "rope_mode",
)  # fmt: skip
OF_KIND = {
    "lrkv": ("rank_key", "rank_value", "latent_frequencies"),
    "mla": ("rank_latent", "rank_private", "latent_norm"),
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
        """Raise `ValueError` for another vLLM, and for a folder that is no factored export."""
        import vllm

        release = ".".join(vllm.__version__.split(".")[:2])
        if release not in TESTED:
            raise ValueError(
                f"lrkv-vllm was tested with vLLM {', '.join(TESTED)} and this is "
                f"{vllm.__version__}: install one of those, or a newer lrkv-vllm"
            )
        config, folder = model_config.hf_config, model_config.model
        kind = getattr(config, "attention_kind", None)
        fields = (*COMMON, *OF_KIND.get(kind, ()))
        missing = [name for name in fields if not hasattr(config, name)]
        if kind not in OF_KIND or missing:
            what = f"has no {missing[0]}" if missing else f"has attention_kind = {kind!r}"
            raise ValueError(
                f"{folder}: config.json {what}, so it is no factored export: write it with "
                "`lrkv export RUN FOLDER --factored`"
            )

    @staticmethod
    def verify_and_update_config(vllm_config) -> None:
        """Raise `ValueError` for a setting that the layers here do not have."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        parallel, config = vllm_config.parallel_config, model.hf_config
        dtype = str(model.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(
                f"--dtype {dtype} is not supported for LRKV: use {' or '.join(DTYPES)}"
            )
        if cache.cache_dtype not in ("auto", dtype):
            raise ValueError(
                f"--kv-cache-dtype {cache.cache_dtype} is not supported for LRKV: leave it out"
            )
        if cache.user_specified_block_size and cache.block_size % SLOTS:
            raise ValueError(
                f"--block-size {cache.block_size} does not fit LRKV's pages: use a multiple of "
                f"{SLOTS}"
            )
        workers = parallel.tensor_parallel_size
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if getattr(config, name) % workers:
                raise ValueError(
                    f"--tensor-parallel-size {workers} does not divide {name} = "
                    f"{getattr(config, name)}: use one that does"
                )
        refused = {
            "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
            "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
            "--quantization": model.quantization is not None,
            "--enable-lora": vllm_config.lora_config is not None,
            "--speculative-config": vllm_config.speculative_config is not None,
        }
        for name, asked in refused.items():
            if asked:
                raise ValueError(f"{name} is not supported for LRKV: leave it out")
        # Nothing here is compiled or captured in CUDA graphs yet.
        model.enforce_eager = True
