"""A run as a folder that transformers, and what builds on it, loads: `lrkv export`.

With `--as factored` LRKV and MLA keep their small caches there: `assets/modeling_lrkv.py.txt` is
the class, in PyTorch; it is exported as modeling_lrkv.py and keeps the parameters' names and
layout. With `--as deepseek` LRKV with the joint norm is a model of DeepSeek's class, whose servers
keep its small cache.

D model width  G key/value heads  K head width  L layers
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lrkv_jax import files
from lrkv_jax.config import ModelConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference.trained_run import TrainedRun
from lrkv_jax.interop import shards
from lrkv_jax.interop.architectures import (
    DEEPSEEK,
    VALUE_BIAS,
    Architecture,
    WeightMapping,
    config_of,
    deepseek_params,
    of_model,
)
from lrkv_jax.interop.tokenizer_files import write_tokenizer
from lrkv_jax.models.accounting.counts import cache_bytes_per_token, parameter_counts, with_mha
from lrkv_jax.models.rope import frequencies, logit_factor
from lrkv_jax.models.transformer import with_parameters
from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.restore import load_run
from lrkv_jax.training.run_dir import read_run

FLOAT = np.dtype(np.float32)
# Each tensor over all devices there are, whatever mesh trained it.
ALL_DEVICES = ("mesh.data=1", "mesh.fsdp=-1", "mesh.context=1", "mesh.tensor=1")
DTYPES = {"float32": FLOAT, "bfloat16": jnp.dtype(jnp.bfloat16)}
LARGEST = 5_000_000_000  # bytes of a file, as transformers writes them
MODELING = Path(__file__).parent / "assets/modeling_lrkv.py.txt"
FACTORED = Architecture("LrkvForCausalLM", "lrkv", (), {}, {}, {}, {})
# Settings that the class reads under our names.
_SAME = ("qk_norm", "qk_gain", "qkv_bias", "norm_gain", "embedding_norm", "gated", "tied_head")
_WHOLE_CACHE = """\
The keys and values of every head are materialized in these weights. A server keeps those keys and
values, {whole:,} bytes per token in bfloat16, whatever the run's own cache took: **it saves nothing
through this class**."""
_FACTORED_CACHE = """\
`modeling_lrkv.py` (`trust_remote_code=True`) keeps {own:,} bytes per token in bfloat16 and decodes
exactly from them. vLLM keeps the same cache with the plugin lrkv-vllm of lrkv_jax."""


def export(
    directory: str | Path,
    target: str | Path,
    *,
    step: int | str | None = None,
    dtype: str = "float32",
    largest: int = LARGEST,
    form: Literal["factored", "deepseek"] | None = None,
) -> str:
    """Write a run's step (the newest unless given) into the folder `target`; returns the class.

    The form is that of one of transformers' classes; or `factored`, LRKV's or MLA's factors and the
    file that decodes from their cache; or `deepseek`, LRKV with the joint norm as DeepSeek's class.

    Parameters stay where they are restored, spread over the devices; the host holds one
    tensor at a time. Raises `LrkvError`, and leaves nothing, for another form or dtype, and where
    the model is none of transformers', the folder holds something, or the run cannot be read.
    """
    if form not in (None, "factored", "deepseek"):
        raise LrkvError(f"form = {form}: use factored or deepseek, or none")
    if dtype not in DTYPES:
        raise LrkvError(f"dtype = {dtype}: use {' or '.join(DTYPES)}")
    factored = form == "factored"
    with files.whole_folder(target) as folder:
        config = read_run(directory)
        model = config.model
        if model.layers_pattern is not None:
            raise LrkvError(
                f"model.layers_pattern = {model.layers_pattern}: no class that is written has "
                "layers of several kinds; train with model.layers_pattern=null model.window=null"
            )
        if model.window is not None:
            raise LrkvError(
                f"model.window = {model.window}: no class that is written has windows; train with "
                f"model.window=null, or import it with train.seq_len={model.window} or less"
            )
        one = FACTORED if factored else of_model(model, deepseek=form == "deepseek")
        settings = _factored_settings(model) if factored else {}
        run = load_run(directory, step=step, overrides=ALL_DEVICES)
        made = (
            _factored_tensors(run.params, model.layers)
            if factored
            else tensors(one, model, run.params)
        )
        cast = (replace(tensor, dtype=DTYPES[dtype]) for tensor in made)
        shards.write(folder, cast, largest)
        special = write_tokenizer(run, folder)
        config_json = config_of(one, model, config.train.seq_len, dtype) | special | settings
        if factored:
            shutil.copyfile(MODELING, folder / "modeling_lrkv.py")
        files.write_json(folder / "config.json", config_json)
        files.write(folder / "README.md", _card(run, one.name, dtype, factored=factored))
    return one.name


def tensors(one: Architecture, model: ModelConfig, params: Any) -> Iterator[shards.Tensor]:
    """The model's tensors as the architecture has them, each made when it is written."""
    if one is DEEPSEEK:
        params = deepseek_params(model, params)
    materialize = model.attention.kind in ("lrkv", "mla")
    kv_shape = (model.width, model.attention.key_heads(model), model.head_width)
    for mapping in one.mappings_of(model):
        name = mapping.ours.rpartition(".")[2]
        found = _parameter(model, params, mapping)
        if materialize and name in ("key", "value"):
            blocks = with_parameters(model, params).blocks
            found = kv_shape, partial(_kv_projection, model, blocks, name)
        if found is None:
            continue
        shape, make = found
        for layer in range(model.layers) if mapping.stacked else (None,):
            made = partial(_laid_out, mapping, make, layer)
            yield shards.Tensor(
                mapping.theirs.format(layer), mapping.layout.shape(shape), FLOAT, made
            )
    if model.qkv_bias:
        zeros = np.zeros(math.prod(kv_shape[1:]), FLOAT)
        for layer in range(model.layers):
            yield shards.Tensor(VALUE_BIAS.format(layer), zeros.shape, FLOAT, lambda: zeros)


def _laid_out(
    mapping: WeightMapping, make: Callable[[int | None], np.ndarray], layer: int | None
) -> np.ndarray:
    return mapping.layout.out(make(layer))


def _kv_projection(model: ModelConfig, blocks: Any, name: str, layer: int) -> np.ndarray:
    """A layer's keys or values as one projection, in float64: [D, G, K]."""
    heads = jax.tree.map(lambda leaf: leaf[layer], blocks).attention.head_weights()
    family_HDK = heads.key_HDK if name == "key" else heads.value_HDK
    each = model.heads // model.attention.key_heads(model)
    return family_HDK[::each].swapaxes(0, 1)


def _parameter(
    model: ModelConfig, params: Any, mapping: WeightMapping
) -> tuple[tuple[int, ...], Callable[[int | None], np.ndarray]] | None:
    """The shape of one layer's parameter, and what makes it; None for one that is not there."""
    found = params
    for name in mapping.ours.split("."):
        found = None if found is None else found.get(name)
    if found is None:
        of_heads = mapping.ours.endswith("_gain")
        ones = np.ones(model.head_width if of_heads else model.width, np.float32)
        return (ones.shape, lambda _: ones) if mapping.ours.endswith("gain") else None
    if mapping.stacked:
        return found.shape[1:], lambda layer: np.asarray(found[layer])
    return found.shape, lambda _: np.asarray(found)


def _factored_settings(model: ModelConfig) -> dict[str, Any]:
    """The fields of config.json in addition to the numbers that every model has.

    Raises `LrkvError` for a model whose cache has no factors that the class knows.
    """
    entry, base, scaling = model.attention, model.rope_base, model.rope_scaling
    if entry.kind == "mla" and entry.rope == "full":
        factors = {
            "rank_latent": entry.kv_lora_rank,
            "rank_private": entry.rank,
            "latent_norm": entry.latent_norm,
        }
    elif (
        entry.kind == "lrkv" and entry.rank and entry.latent_norm == "none" and entry.rope != "none"
    ):
        rank_key, rank_value = entry.ranks
        factors = {
            "rank_key": rank_key,
            "rank_value": rank_value,
            "latent_frequencies": list(frequencies(rank_key, base, scaling)),
        }
    else:
        raise LrkvError(
            f"attention {entry.label} has no factors for --as factored: leave it out, or use lrkv, "
            "or mla with rope: full"
        )
    return {
        **{name: getattr(model, name) for name in _SAME},
        # Its frequencies are scaled already, and vLLM multiplies a context by a linear factor.
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "final_logit_softcapping": model.softcap,
        "hidden_act": model.activation,
        "attention_kind": entry.kind,
        "rope_mode": entry.rope,
        **factors,
        "key_frequencies": list(frequencies(model.head_width, base, scaling)),
        "logit_scale": model.head_width**-0.5 * logit_factor(scaling),
        "tie_word_embeddings": False,
        "auto_map": {
            "AutoConfig": "modeling_lrkv.LrkvConfig",
            "AutoModelForCausalLM": "modeling_lrkv.LrkvForCausalLM",
        },
    }


def _factored_tensors(params: Any, layers: int) -> Iterator[shards.Tensor]:
    """Every parameter by its path; those of blocks, layer by layer."""
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not name.startswith("blocks."):
            yield shards.Tensor(name, leaf.shape, leaf.dtype, partial(np.asarray, leaf))
            continue
        for layer in range(layers):
            there = name.replace("blocks.", f"blocks.{layer}.", 1)
            yield shards.Tensor(there, leaf.shape[1:], leaf.dtype, partial(_layer_of, leaf, layer))


def _layer_of(leaf: jax.Array, layer: int) -> np.ndarray:
    return np.asarray(leaf[layer])


def _tokens(run: TrainedRun) -> int:
    """The tokens that a run's steps took, whose batches may have been of several sizes."""
    with Checkpointer(Path(run.config.directory) / "checkpoints") as checkpoints:
        return checkpoints.manifest(run.step)["tokens"]


def _card(run: TrainedRun, architecture: str, dtype: str, *, factored: bool = False) -> str:
    """README.md of the exported folder, in Markdown."""
    config, model = run.config, run.config.model
    # As others have it: no rows in eight bits.
    plain = model.model_copy(update={"kv_cache_dtype": "auto"})
    own, groups = cache_bytes_per_token(plain), model.attention.key_heads(model)
    whole = 4 * model.layers * groups * model.head_width
    mha = cache_bytes_per_token(with_mha(model))
    trained = _tokens(run)
    data = Path(config.data.source).name if config.data.mixture is None else "conversations"
    rows = [
        ("class", f"`{architecture}`"),
        ("attention of the run", model.attention.label),
        ("parameters of the run", f"{parameter_counts(model).total:,}"),
        ("layers, width, heads, head width",
         f"{model.layers}, {model.width}, {model.heads}, {model.head_width}"),
        ("weights", dtype),
        ("context", f"{config.train.seq_len:,} tokens"),
        ("trained here", f"{run.step:,} steps, {trained:,} tokens of {data}" if trained else "no"),
        ("tokenizer", Path(config.data.tokenizer).name),
        ("cache of lrkv_jax", f"{own:,} bytes per token in bfloat16, {own / mha:.1%} of MHA's"),
    ]  # fmt: skip
    path = Path(config.directory) / "evaluation.json"
    evaluation = files.read_json(path, "evaluate the run again") or {}
    if evaluation.get("step") == run.step and not evaluation.get("changed_settings"):
        for name, found in evaluation.items():
            if not isinstance(found, dict):
                continue
            if found.get("dataset", {}).get("demonstration"):
                name += ", demonstration set"
            rows += [
                (f"{name}, {key}", f"{value:.4f}")
                for key, value in found.items()
                if isinstance(value, float) and key != "seconds"
            ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    about = _WHOLE_CACHE.format(whole=whole)
    if factored:
        # The class's cache has no column for the biases of keys.
        plain = plain.model_copy(update={"qkv_bias": False})
        about = _FACTORED_CACHE.format(own=cache_bytes_per_token(plain))
    elif own == whole or architecture == DEEPSEEK.name:
        about = f"A server's cache takes {own:,} bytes per token in bfloat16, as the run's own."
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"
        f"# {config.name}, {model.attention.label}\n\nExported by lrkv_jax.\n\n"
        f"| | |\n|---|---|\n{table}\n\n{about}\n"
    )
