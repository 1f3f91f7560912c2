"""A Hugging Face folder as a run like any other, at step 0: `lrkv import`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lrkv_jax import files
from lrkv_jax.config import ModelConfig, RunConfig, dump_config, frozen
from lrkv_jax.config.load import RUN_TOKENIZER, config_from, parse_overrides
from lrkv_jax.data.hub import download
from lrkv_jax.data.tokenizer import EMBEDDED, Tokenizer, foreign_tokenizer
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.distributed.rules import parameter_shardings
from lrkv_jax.errors import LrkvError
from lrkv_jax.interop import shards
from lrkv_jax.interop.architectures import (
    OUTPUT_BIAS,
    VALUE_BIAS,
    Architecture,
    WeightMapping,
    architecture_of,
    of_config,
    whole_number,
)
from lrkv_jax.interop.tokenizer_files import KEPT, keep_special_ids
from lrkv_jax.models.transformer import abstract_parameters, specs
from lrkv_jax.training.checkpointing import Checkpointer

# Not Mistral's consolidated.safetensors, which are the same weights once more.
FILES = ("config.json", *KEPT, "[!c]*.safetensors", shards.INDEX)
LONGEST = 8192  # context of a run whose model names a longer one
BUFFERS = ("rotary_emb.inv_freq",)  # in old files, computed here

Say = Callable[[str], None]


def import_model(
    source: str, directory: str | Path, overrides: Sequence[str] = (), *, say: Say = print
) -> RunConfig:
    """Make a run of a folder, or of a model on the hub, which is fetched next to the run first.

    Each parameter is read tensor by tensor into its place on the mesh of `overrides`: the host
    holds a device's share of one parameter and one tensor. The tokenizer's files are copied too.
    `say` gets a line for each difference from a run that is trained here.

    Raises `LrkvError`, and leaves no run, for a folder that is not such a model.
    """
    with files.whole_folder(directory) as fresh:
        folder = _found(source, Path(directory))
        config_json = files.read_json(folder / "config.json", "fetch it again")
        if config_json is None:
            raise LrkvError(f"{folder} has no config.json: name the folder of a model")
        config, one = _config(folder, config_json, Path(directory), overrides)
        if (window := _left_out(config_json, config.model)) is not None:
            say(
                f"its window of {window} is no shorter than the context, train.seq_len = "
                f"{config.train.seq_len}: the run has none, and reads no longer text right"
            )
        mesh = make_mesh(config.mesh)
        stored = shards.read(folder)
        tokenizer = foreign_tokenizer(str(folder), say)
        if tokenizer.vocabulary > config.model.vocabulary:
            raise LrkvError(
                f"{folder / 'tokenizer.json'} has {tokenizer.vocabulary} ids, and the model "
                f"{config.model.vocabulary}: it is another model's"
            )
        places = _checked(one, config.model, stored, folder)
        (fresh / RUN_TOKENIZER).mkdir()
        for name in KEPT:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, fresh / RUN_TOKENIZER / name)
        keep_special_ids(config_json, tokenizer.vocabulary, fresh / RUN_TOKENIZER)
        params = _read_parameters(config.model, mesh, places, folder)
        write_run(fresh, directory, config, params, tokenizer)
    return config


def write_run(
    fresh: Path, directory: str | Path, config: RunConfig, params: Any, tokenizer: Tokenizer
) -> None:
    """Write a run into the folder `fresh`, which then becomes `directory`.

    A tokenizer in files is copied too, and config.yaml names it by its file's name.
    Raises `LrkvError` where the disk fails.
    """
    source, copy = Path(config.data.tokenizer), fresh / RUN_TOKENIZER
    if config.data.tokenizer not in EMBEDDED and not copy.exists():
        shutil.copytree(source, copy) if source.is_dir() else shutil.copyfile(source, copy)
    if copy.exists():
        data = config.data.model_copy(update={"tokenizer": RUN_TOKENIZER})
        config = config.model_copy(update={"data": data})
    about = {
        "config": config.model_dump(mode="json"),
        "tokens": 0,
        "loader": {"step": 0, "tokenizer": tokenizer.fingerprint},
    }
    with Checkpointer(fresh / "checkpoints") as checkpoints:
        checkpoints.save(0, {"params": params}, about)
    if checkpoints.failures:
        raise LrkvError(f"{directory} cannot be written: name another place")
    files.write(fresh / "config.yaml", dump_config(config))


def _found(source: str, directory: Path) -> Path:
    """The folder itself, or that into which a model on the hub is fetched."""
    if Path(source).is_dir():
        return Path(source)
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise LrkvError(f"{source} is no folder, and no model on the hub: write it OWNER/NAME")
    folder = directory.with_name(f"{directory.name}.download")
    download(source, "main", FILES, folder, "model")
    return folder


def _config(
    folder: Path, config_json: dict[str, Any], directory: Path, overrides: Sequence[str]
) -> tuple[RunConfig, Architecture]:
    """The run's configuration; the context is the model's, up to `LONGEST`, unless given."""
    architecture_of(config_json)  # before its numbers, which other classes name otherwise
    longest = whole_number(config_json, "max_position_embeddings")
    train = {"seq_len": min(longest, LONGEST), "global_batch_size": 8, "steps": 1000}
    given = [value for key, value in parse_overrides(overrides) if key == "train.seq_len"]
    context = frozen.whole_number(given[-1]) if given else train["seq_len"]
    if not isinstance(context, int):  # the configuration refuses it by name
        context = train["seq_len"]
    one, model, entry = of_config(config_json, context)
    raw = {
        "name": directory.name.lstrip(".")[:60] or "imported",
        "attention": entry["kind"],
        "variants": {entry["kind"]: entry},
        "model": model,
        "train": train,
        "data": {"tokenizer": str(directory / RUN_TOKENIZER)},
        "run_dir": str(directory),
    }
    return config_from(raw, folder / "config.json", overrides), one


def _left_out(config_json: dict[str, Any], model: ModelConfig) -> int | None:
    """The window that the model has in a longer context, and not in the run's."""
    try:
        window = of_config(config_json, 2**40)[1]["window"]
    except LrkvError:  # of some layers
        window = (architecture_of(config_json).defaults | config_json)["sliding_window"]
    return None if model.window is not None else window


def _checked(
    one: Architecture, model: ModelConfig, stored: dict[str, shards.Tensor], folder: Path
) -> dict[str, tuple[WeightMapping, list[shards.Tensor]]]:
    """For each parameter its mapping and its tensors, one for each layer.

    Raises `LrkvError` unless exactly these are there, in their shapes.
    """
    shapes = _by_path(abstract_parameters(model))
    copies = (*BUFFERS, "lm_head.weight") if model.tied_head else BUFFERS
    stored = _with_output_biases(model, stored, folder) if model.qkv_bias else stored
    left = {name for name in stored if not name.endswith(copies)}
    places: dict[str, tuple[WeightMapping, list[shards.Tensor]]] = {}
    for mapping in one.mappings_of(model):
        if mapping.ours not in shapes:
            continue
        shape = shapes[mapping.ours].shape[1:] if mapping.stacked else shapes[mapping.ours].shape
        places[mapping.ours] = mapping, []
        for layer in range(model.layers) if mapping.stacked else (None,):
            name = mapping.theirs.format(layer)
            found = _tensor(stored, name, mapping.layout.shape(shape), folder)
            places[mapping.ours][1].append(found)
            left.discard(name)
    if model.tied_head and "lm_head.weight" in stored:
        _, (table,) = places["embedding.table"]
        if not np.array_equal(stored["lm_head.weight"].make(), table.make()):
            raise LrkvError(
                f"{folder}: config.json ties lm_head.weight to {table.name}, and they differ: set "
                "tie_word_embeddings to false there"
            )
    if left:
        raise LrkvError(
            f"{folder} has {len(left)} tensors more than {one.name}, such as {min(left)}: it is "
            "another model"
        )
    assert places.keys() == shapes.keys(), shapes.keys() ^ places.keys()
    return places


def _tensor(
    stored: dict[str, shards.Tensor], name: str, need: tuple[int, ...], folder: Path
) -> shards.Tensor:
    """A tensor that must be there, in this shape."""
    if name not in stored:
        raise LrkvError(f"{folder} has no tensor {name}, as config.json asks for: fetch both again")
    if (found := stored[name].shape) != need:
        raise LrkvError(
            f"{folder}: {name} is {list(found)}, and config.json makes it {list(need)}: "
            "they are of different models"
        )
    return stored[name]


def _with_output_biases(
    model: ModelConfig, stored: dict[str, shards.Tensor], folder: Path
) -> dict[str, shards.Tensor]:
    """The tensors with the biases of values in those of attention's output, which Qwen2 has not."""
    made, D, K = dict(stored), model.width, model.head_width
    groups = model.attention.key_heads(model)

    def folded(values, kernel, output) -> np.ndarray:
        bias_GK = np.float64(values.make()).reshape(groups, K)
        of_heads_N = np.repeat(bias_GK, model.heads // groups, axis=0).reshape(-1)
        whole_D = np.float64(kernel.make()) @ of_heads_N
        return (whole_D + (0 if output is None else output.make())).astype(np.float32)

    for layer in range(model.layers):
        value, output = (name.format(layer) for name in (VALUE_BIAS, OUTPUT_BIAS))
        kernel = output.replace(".bias", ".weight")
        read = (
            _tensor(stored, value, (groups * K,), folder),
            _tensor(stored, kernel, (D, model.heads * K), folder),
            _tensor(stored, output, (D,), folder) if output in stored else None,
        )
        del made[value]
        made[output] = shards.Tensor(output, (D,), np.dtype(np.float32), partial(folded, *read))
    return made


def _by_path(params: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _read_parameters(
    model: ModelConfig,
    mesh: Mesh,
    places: dict[str, tuple[WeightMapping, list[shards.Tensor]]],
    folder: Path,
) -> Any:
    """The parameters, each device's share read for it alone.

    Raises `LrkvError` for a value that is not finite.
    """
    shapes = abstract_parameters(model)
    shardings = parameter_shardings(specs(model), shapes, mesh)

    def place(path, leaf, sharding):
        mapping, tensors = places[jax.tree_util.keystr(path, simple=True, separator=".")]

        def read(tensor: shards.Tensor, shape: tuple[int, ...], index) -> np.ndarray:
            with np.errstate(over="ignore"):
                values = mapping.layout.into(tensor.make(), shape)[index].astype(np.float32)
            if not np.isfinite(values).all():
                raise LrkvError(
                    f"{folder}: {tensor.name} has values that are no finite float32: fetch the "
                    "model again"
                )
            return values

        def share(index: tuple[slice, ...]) -> np.ndarray:
            if not mapping.stacked:
                return read(tensors[0], leaf.shape, index)
            layers = tensors[index[0]]
            sizes = [len(range(*s.indices(n))) for s, n in zip(index, leaf.shape, strict=True)]
            values = np.empty(sizes, np.float32)
            for at, tensor in enumerate(layers):
                values[at] = read(tensor, leaf.shape[1:], index[1:])
            return values

        return jax.block_until_ready(jax.make_array_from_callback(leaf.shape, sharding, share))

    return jax.tree.map_with_path(place, shapes, shardings)
