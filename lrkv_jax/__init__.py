"""Low-rank key-value attention (LRKV) in JAX: five attention variants on equal terms.

The public names are imported on first use, so that `lrkv plan` answers without loading JAX and
the core (model, kernels, decode) loads without grain or TFDS.
"""

import sys
from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

_PUBLIC = {
    "load_config": "lrkv_jax.config",
    "ModelConfig": "lrkv_jax.config",
    "AttentionConfig": "lrkv_jax.config",
    "MeshConfig": "lrkv_jax.config",
    "Transformer": "lrkv_jax.model",
    "make_mesh": "lrkv_jax.sharding",
    "make_optimizer": "lrkv_jax.optim",
    "make_loader": "lrkv_jax.data.loader",
    "TrainState": "lrkv_jax.train.state",
    "train": "lrkv_jax.run.loop",
    "Checkpointer": "lrkv_jax.checkpoint",
    "load_run": "lrkv_jax.run.restore",
    "generate": "lrkv_jax.decode",
    "evaluate": "lrkv_jax.evals",
    "head_diversity": "lrkv_jax.analysis",
}

__all__ = ["LrkvError", "__version__", *_PUBLIC]


class _Package(ModuleType):
    def __setattr__(self, name, value):
        """Keep `train` the function: importing the room of that name would put it in its place."""
        if name not in _PUBLIC:
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name):
    if name == "LrkvError":
        from lrkv_jax.errors import LrkvError

        return LrkvError
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'lrkv_jax' has no attribute {name!r}")
