"""A run as a folder that transformers, and what builds on it, loads: `lrkv export`.

D model width  G key/value heads  K head width  L layers
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from lrkv_jax import files
from lrkv_jax.config import ModelConfig
from lrkv_jax.interop import shards
from lrkv_jax.interop.architectures import (
    VALUE_BIAS,
    Architecture,
    WeightMapping,
    config_of,
    of_model,
)
from lrkv_jax.interop.card import card
from lrkv_jax.interop.factored import FACTORED, MODELING, as_they_are, check_factored, settings_of
from lrkv_jax.interop.tokenizer_files import write_tokenizer
from lrkv_jax.training.restore import load_run
from lrkv_jax.training.run_dir import read_run

FLOAT = np.dtype(np.float32)
DTYPES = {"float32": FLOAT, "bfloat16": jnp.dtype(jnp.bfloat16)}
LARGEST = 5_000_000_000  # bytes of a file, as transformers writes them


def export(
    directory: str | Path,
    target: str | Path,
    *,
    step: int | str | None = None,
    dtype: str = "float32",
    largest: int = LARGEST,
    factored: bool = False,
) -> str:
    """Write a run's step (the newest unless given) into the folder `target`; returns the class.

    `factored` keeps LRKV's factors and adds the file that decodes from their cache.

    Parameters stay where they are restored, spread over the devices; the host holds one
    tensor at a time. Raises `LrkvError`, and leaves nothing, where the model is none of
    transformers', the folder holds something, or the run cannot be read.
    """
    with files.whole_folder(target) as folder:
        config = read_run(directory)
        model = config.model
        one = FACTORED if factored else of_model(model)
        if factored:
            check_factored(model)
        run = load_run(directory, step=step, overrides=["mesh.data=1", "mesh.fsdp=-1"])
        made = (
            as_they_are(run.params, model.layers) if factored else tensors(one, model, run.params)
        )
        cast = (replace(tensor, dtype=DTYPES[dtype]) for tensor in made)
        shards.write(folder, cast, largest)
        special = write_tokenizer(run, folder)
        config_json = config_of(one, model, config.train.seq_len, dtype) | special
        if factored:
            config_json |= settings_of(model)
            shutil.copyfile(MODELING, folder / "modeling_lrkv.py")
        files.write_json(folder / "config.json", config_json)
        files.write(folder / "README.md", card(run, one.name, dtype, factored=factored))
    return one.name


def tensors(one: Architecture, model: ModelConfig, params: Any) -> Iterator[shards.Tensor]:
    """The model's tensors as the architecture has them, each made when it is written."""
    for mapping in one.mappings_of(model):
        found = _parameter(model, params, mapping)
        if found is None:
            continue
        shape, make = found
        for layer in range(model.layers) if mapping.stacked else (None,):
            made = partial(_laid_out, mapping, make, layer)
            yield shards.Tensor(
                mapping.theirs.format(layer), mapping.layout.shape(shape), FLOAT, made
            )
    if model.qkv_bias:
        zeros = np.zeros(model.attention.key_heads(model) * model.head_width, FLOAT)
        for layer in range(model.layers):
            yield shards.Tensor(VALUE_BIAS.format(layer), zeros.shape, FLOAT, lambda: zeros)


def _laid_out(
    mapping: WeightMapping, make: Callable[[int | None], np.ndarray], layer: int | None
) -> np.ndarray:
    return mapping.layout.out(make(layer))


def _parameter(
    model: ModelConfig, params: Any, mapping: WeightMapping
) -> tuple[tuple[int, ...], Callable[[int | None], np.ndarray]] | None:
    """The shape of one layer's parameter, and what makes it; None for one that is not there."""
    made_of = {"lrkv": _shared_and_residual, "mla": _latents}.get(model.attention.kind)
    if made_of and mapping.ours.endswith((".key", ".value")):
        shape = (model.width, model.attention.key_heads(model), model.head_width)
        name = mapping.ours.rpartition(".")[2]
        return shape, lambda layer: made_of(params["blocks"]["attention"], name, layer)
    found = params
    for name in mapping.ours.split("."):
        found = None if found is None else found.get(name)
    if found is None:
        of_heads = mapping.ours.endswith("_gain")
        ones = np.ones(model.head_width if of_heads else model.width, np.float32)
        return (ones.shape, lambda _: ones) if mapping.gain else None
    if mapping.stacked:
        return found.shape[1:], lambda layer: np.asarray(found[layer])
    return found.shape, lambda _: np.asarray(found)


def _shared_and_residual(attention: Any, name: str, layer: int | None) -> np.ndarray:
    """LRKV's keys or values as one projection: W + U_g B_g in float64, [D, G, K]."""
    shared_DK = np.asarray(attention[name][layer], np.float64)[:, None]
    if "key_up" not in attention:
        return shared_DK
    return shared_DK + _product(attention[f"{name}_down"], attention[f"{name}_up"], layer)


def _latents(attention: Any, name: str, layer: int | None) -> np.ndarray:
    """MLA's, whose latents have no norm: W_down W_up + U_g B_g in float64, [D, G, K]."""
    down_DC, up_CGK = (
        np.asarray(attention[weight][layer], np.float64) for weight in ("down", f"up_{name}")
    )
    common_DGK = np.einsum("DC,CGK->DGK", down_DC, up_CGK)
    if "private_down" not in attention:
        return common_DGK
    return common_DGK + _product(attention["private_down"], attention[f"private_{name}"], layer)


def _product(down: Any, up: Any, layer: int | None) -> np.ndarray:
    down_GDR, up_GRK = (np.asarray(weight[layer], np.float64) for weight in (down, up))
    return (down_GDR @ up_GRK).swapaxes(0, 1)
