"""LRKV in vLLM: `vllm serve FOLDER` of what `lrkv export RUN FOLDER --as factored` wrote.

vLLM calls `register` when it starts (entry point `vllm.general_plugins`).
"""

# The minor versions of vLLM that this was tested with: its interfaces for attention move.
TESTED = ("0.32",)


def register() -> None:
    """Tell vLLM and transformers of the class; what vLLM serves otherwise is left alone."""
    import vllm
    from vllm.logger import init_logger

    if ".".join(vllm.__version__.split(".")[:2]) not in TESTED:
        init_logger(__name__).warning(
            "lrkv-vllm was tested with vLLM %s and this is %s, which serves no LRKV model: "
            "install one of those, or a newer lrkv-vllm", " and ".join(TESTED), vllm.__version__,
        )  # fmt: skip
        return
    from transformers import AutoConfig
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from lrkv_vllm.config import Checks, LrkvConfig

    AutoConfig.register("lrkv", LrkvConfig, exist_ok=True)
    MODELS_CONFIG_MAP["LrkvForCausalLM"] = Checks
    vllm.ModelRegistry.register_model("LrkvForCausalLM", "lrkv_vllm.model:LrkvForCausalLM")
