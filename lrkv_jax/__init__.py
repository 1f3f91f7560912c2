"""Low-rank key-value attention (LRKV) in JAX: five attention variants on equal terms.

The public names are imported on first use, so that `lrkv plan` answers without loading JAX and
the core (model, kernels, decode) loads without grain or TFDS.
"""

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "load_config": "lrkv_jax.config",
    "ModelConfig": "lrkv_jax.config",
    "AttentionConfig": "lrkv_jax.config",
    "RunConfig": "lrkv_jax.config",
    "make_attention": "lrkv_jax.models.attention",
    "MHA": "lrkv_jax.models.attention",
    "GQA": "lrkv_jax.models.attention",
    "MQA": "lrkv_jax.models.attention",
    "MLA": "lrkv_jax.models.attention",
    "LRKV": "lrkv_jax.models.attention",
    "MeshConfig": "lrkv_jax.config",
    "Transformer": "lrkv_jax.models.transformer",
    "make_mesh": "lrkv_jax.distributed.mesh",
    "make_optimizer": "lrkv_jax.optim",
    "make_loader": "lrkv_jax.data.loader",
    "TrainState": "lrkv_jax.training.state",
    "train": "lrkv_jax.training.loop",
    "Checkpointer": "lrkv_jax.training.checkpointing",
    "load_run": "lrkv_jax.training.restore",
    "Engine": "lrkv_jax.inference",
    "Sampling": "lrkv_jax.inference",
    "evaluate": "lrkv_jax.evaluation",
    "head_diversity": "lrkv_jax.lab.analysis",
}

# What other libraries have under a name of theirs.
_INSTEAD = {
    **dict.fromkeys(
        ("Attention", "LRKVAttention", "LowRankAttention", "MultiHeadAttention"),
        "make_attention(config, rngs=...)",
    ),
    **dict.fromkeys(("Model", "GPT", "LanguageModel"), "Transformer"),
    **dict.fromkeys(("generate", "LLM"), "load_run(DIR).generate, or Engine for many requests"),
    **dict.fromkeys(("load", "load_model", "from_pretrained", "load_checkpoint"), "load_run"),
    **dict.fromkeys(("Config", "LRKVConfig"), "ModelConfig"),
    **dict.fromkeys(("SamplingParams", "GenerationConfig"), "Sampling"),
    **dict.fromkeys(("Trainer", "fit"), "train"),
}

__all__ = ["LrkvError", "__version__", *_PUBLIC]


def __getattr__(name):
    if name == "LrkvError":
        from lrkv_jax.errors import LrkvError

        return LrkvError
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    from lrkv_jax.errors import nearest

    fix = f": use {_INSTEAD[name]}" if name in _INSTEAD else nearest(name, __all__)
    raise AttributeError(f"lrkv_jax has no name {name}{fix}")


def __dir__():
    return sorted({*globals(), *__all__})
