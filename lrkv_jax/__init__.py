"""Low-rank key-value attention (LRKV) in JAX: five attention variants on equal terms.

The public names are imported on first use, so that `lrkv plan` answers without loading JAX and
the core (model, kernels, decode) loads without grain or TFDS.
"""

import sys
from importlib import import_module
from inspect import signature
from types import ModuleType

__version__ = "0.1.0"

_PUBLIC = {
    "load_config": "lrkv_jax.config",
    "ModelConfig": "lrkv_jax.config",
    "AttentionConfig": "lrkv_jax.config",
    "MeshConfig": "lrkv_jax.config",
    "Transformer": "lrkv_jax.models.transformer",
    "make_mesh": "lrkv_jax.distributed",
    "make_optimizer": "lrkv_jax.optim",
    "make_loader": "lrkv_jax.data.loader",
    "TrainState": "lrkv_jax.training.state",
    "train": "lrkv_jax.train",
    "Checkpointer": "lrkv_jax.training.checkpointing",
    "load_run": "lrkv_jax.training.restore",
    "generate": "lrkv_jax.inference",
    "evaluate": "lrkv_jax.evaluation",
    "head_diversity": "lrkv_jax.lab.analysis",
}

__all__ = ["LrkvError", "__version__", *_PUBLIC]


class _Train(ModuleType):
    """The package `lrkv_jax.train`, which can be called too: `lrkv_jax.train(config)` trains."""

    def __call__(self, *args, **kwargs):
        return _run_train()(*args, **kwargs)

    @property
    def __signature__(self):
        return signature(_run_train())


def _run_train():
    return import_module("lrkv_jax.training.loop").train


class _Package(ModuleType):
    def __setattr__(self, name, value):
        """Let `train` be called as soon as the package of that name is imported."""
        if name == "train":
            value.__class__ = _Train
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name):
    if name == "LrkvError":
        from lrkv_jax.errors import LrkvError

        return LrkvError
    if name in _PUBLIC:
        found = import_module(_PUBLIC[name])
        return found if found.__name__ == f"{__name__}.{name}" else getattr(found, name)
    raise AttributeError(f"module 'lrkv_jax' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
