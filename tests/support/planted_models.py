"""Runs with random weights, which nobody trained, and the weights of tiny models from shapes."""

import numpy as np
from support.tiny import TINY

IDS = [[7, 200, 31, 31, 5, 99, 260, 128, 64, 3, 17, 240, 1, 77, 190, 42]]

# A block as Llama's.
LLAMA = (
    "model.qk_norm=false", "model.norm_gain=true", "model.embedding_norm=false",
    "model.softcap=null", "model.gated=true", "model.activation=silu",
)  # fmt: skip

YARN = "model.rope_scaling={kind: yarn, factor: 4, original_context: 8, attention_factor: 1.3}"

# MLA that rotates whole keys; `lrkv convert` also leaves out its norms of latents.
FULL_MLA = ("attention=mla", "attention.rope=full", "attention.qk_rope_head_dim=0")


def drawn(shapes):
    """float32 arrays by name: normal ones, and gains around 1."""
    random = np.random.RandomState(0)  # whose numbers no version changes
    arrays = {}
    for name in sorted(shapes):
        x = 0.15 * random.standard_normal(shapes[name])
        arrays[name] = np.float32(1 + x if "norm" in name or "gain" in name else x)
    return arrays


def configured(directory, *overrides):
    """The configuration of a tiny run, and its directory with that alone."""
    from lrkv_jax.config import dump_config, load_config

    config = load_config("quickstart", [*TINY, *overrides, f"run_dir={directory}"])
    directory.mkdir()
    (directory / "config.yaml").write_text(dump_config(config))
    return config


def plant(directory, *overrides):
    """A run whose checkpoint of step 7 holds the weights that `drawn` gives."""
    import jax

    from lrkv_jax.models.transformer import abstract_parameters
    from lrkv_jax.training.checkpointing import Checkpointer

    config = configured(directory, *overrides)
    leaves, tree = jax.tree.flatten_with_path(abstract_parameters(config.model))
    shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}
    arrays = drawn(shapes)
    params = tree.unflatten(jax.numpy.asarray(arrays[name]) for name in shapes)
    about = {"config": config.model_dump(mode="json"), "tokens": 0, "loader": {"step": 7}}
    with Checkpointer(directory / "checkpoints") as checkpoints:
        checkpoints.save(7, {"params": params}, about)
