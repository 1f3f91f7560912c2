"""A run as a folder that transformers, and what builds on it, loads: `lrkv export`.

D model width  G key/value heads  K head width  L layers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from lrkv_jax import disk
from lrkv_jax.config import ModelConfig
from lrkv_jax.interop import shards
from lrkv_jax.interop.architectures import Architecture, Row, config_of, of_model
from lrkv_jax.interop.card import card
from lrkv_jax.interop.tokenizer_files import write_tokenizer
from lrkv_jax.run.restore import load_run
from lrkv_jax.run.run_dir import read_run

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": jnp.dtype(jnp.bfloat16)}
LARGEST = 5_000_000_000  # bytes of a file, as transformers writes them


def export(
    directory: str | Path,
    target: str | Path,
    *,
    step: int | str | None = None,
    dtype: str = "float32",
    largest: int = LARGEST,
) -> str:
    """Write a run's step (the newest unless given) into the folder `target`; returns the class.

    Parameters stay where they are restored, spread over the devices; the host holds one tensor at a
    time. Raises `LrkvError`, and leaves nothing, where the model is none of transformers', the
    folder holds something, or the run cannot be read.
    """
    with disk.whole_folder(target) as folder:
        config = read_run(directory)
        model, one = config.model, of_model(config.model)
        run = load_run(directory, step=step, overrides=["mesh.data=1", "mesh.fsdp=-1"])
        shards.write(folder, tensors(one, model, run.params, DTYPES[dtype]), largest)
        special = write_tokenizer(run, folder)
        said = config_of(one, model, config.train.context, dtype) | special
        disk.write_json(folder / "config.json", said)
        disk.write(folder / "README.md", card(run, one.name, dtype))
    return one.name


def tensors(
    one: Architecture, model: ModelConfig, params: Any, dtype: np.dtype
) -> Iterator[shards.Tensor]:
    """The model's tensors as the architecture has them, each made when it is written."""
    for row in one.rows_of(model):
        found = _parameter(model, params, row)
        if found is None:
            continue
        shape, make = found
        for layer in range(model.layers) if row.stacked else (None,):
            made = partial(_laid_out, row, make, layer, dtype)
            yield shards.Tensor(row.theirs.format(layer), row.layout.shape(shape), dtype, made)


def _laid_out(
    row: Row, make: Callable[[int | None], np.ndarray], layer: int | None, dtype: np.dtype
) -> np.ndarray:
    return row.layout.out(make(layer)).astype(dtype)


def _parameter(
    model: ModelConfig, params: Any, row: Row
) -> tuple[tuple[int, ...], Callable[[int | None], np.ndarray]] | None:
    """The shape of one layer's parameter, and what makes it; None for one that is not there."""
    found = params
    for name in row.ours.split("."):
        found = None if found is None else found.get(name)
    if found is None:
        ones = np.ones(model.width, np.float32)
        return (ones.shape, lambda _: ones) if row.gain else None
    if model.attention.kind == "lrkv" and row.ours.endswith((".key", ".value")):
        shape = (model.width, model.attention.key_heads(model), model.head_width)
        name = row.ours.rpartition(".")[2]
        return shape, lambda layer: _whole(params["blocks"]["attention"], name, layer)
    if row.stacked:
        return found.shape[1:], lambda layer: np.asarray(found[layer])
    return found.shape, lambda _: np.asarray(found)


def _whole(attention: Any, name: str, layer: int | None) -> np.ndarray:
    """LRKV's keys or values as one projection: W + U_g B_g in float64, [D, G, K]."""
    read = name if name in attention else "key"  # tied, values read what keys read
    weights = (read, f"{read}_down", f"{name}_up")
    shared_DK, *factors = (
        np.asarray(attention[weight][layer], np.float64)
        for weight in weights
        if weight in attention
    )
    if not factors:
        return shared_DK[:, None]
    down_GDR, up_GRK = factors
    return (shared_DK + down_GDR @ up_GRK).swapaxes(0, 1)
