"""Tensors in safetensors files, one at a time: https://github.com/huggingface/safetensors#format.

A file is the length of its header (8 bytes), the header (JSON: each tensor's type,
shape and place) and the tensors' bytes. The library's writer takes a file's tensors
together; here each exists only while it is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from lrkv_jax.data.hub import FILE as PROVENANCE
from lrkv_jax.errors import LrkvError
from lrkv_jax.files import read_json, write_json

FLOATS: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
}
NAMES = {dtype: name for name, dtype in FLOATS.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_TORN = "the file is torn: fetch it again"


@dataclass(frozen=True)
class Tensor:
    """A tensor that is made, or read, when it is needed."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write(folder: Path, tensors: Iterable[Tensor], largest: int) -> None:
    """Write tensors as model.safetensors, or as several files of at most `largest` bytes and their
    index; a tensor that is larger has a separate file."""
    files: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(one.nbytes for one in files[-1]) + tensor.nbytes > largest:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        _write_file(folder / SINGLE, files[0])
        return
    where: dict[str, str] = {}
    for number, some in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(folder / name, some)
        where |= {tensor.name: name for tensor in some}
    total = sum(tensor.nbytes for some in files for tensor in some)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _write_file(path: Path, tensors: list[Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        kind, shape = NAMES[tensor.dtype], list(tensor.shape)
        header[tensor.name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            array = np.ascontiguousarray(tensor.make(), tensor.dtype)
            assert array.shape == tensor.shape, (tensor.name, array.shape)
            array.view(np.uint8).tofile(file)


def read(folder: Path) -> dict[str, Tensor]:
    """A folder's tensors by name; their bytes are mapped, and read when they are needed.

    Raises `LrkvError` for a folder without tensors, a torn file and types that are not floats.
    """
    if (folder / SINGLE).is_file():  # an index next to it is left over
        return {tensor.name: tensor for tensor in _read_file(folder / SINGLE)}
    listed = read_json(folder / INDEX, "fetch it again")
    if listed is None:
        others = sorted(path.name for path in folder.glob("*.bin"))
        has = f"it has {others[0]}: convert it with transformers" if others else "fetch them"
        if (folder / PROVENANCE).is_file():
            has = "its repository has none: save it as safetensors with transformers"
        raise LrkvError(f"{folder} has no {SINGLE} and no {INDEX}: {has}")
    where = listed.get("weight_map")
    if not isinstance(where, dict) or not all(map(_is_shard, where.values())):
        raise LrkvError(
            f"{folder / INDEX} has no weight_map from tensors to *.safetensors next to it: fetch "
            "it again"
        )
    names = sorted(set(where.values()))
    tensors = {one.name: one for name in names for one in _read_file(folder / name)}
    if absent := sorted(set(where) - set(tensors)):
        raise LrkvError(f"{folder / INDEX} names {absent[0]}, which no file holds: fetch it again")
    return tensors


def _is_shard(name: Any) -> bool:
    """Whether an index may name this file: one in the folder itself."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _read_file(path: Path) -> Iterator[Tensor]:
    """A file's tensors; raises `LrkvError` where its header does not fit its bytes."""
    name = "the header"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:
                raise LrkvError(f"{path}: {_TORN}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            dtype, shape = _dtype(path, name, entry["dtype"]), tuple(map(index, entry["shape"]))
            start, end = (8 + length + index(offset) for offset in entry["data_offsets"])
            if math.prod(shape) * dtype.itemsize != end - start or not 8 <= start <= end <= size:
                raise LrkvError(f"{path}: {name} is not where its bytes are: {_TORN}")
            yield Tensor(name, shape, dtype, partial(np.memmap, path, dtype, "r", start, shape))
    except OSError as error:
        raise LrkvError(f"{path} cannot be read ({error.strerror}): fetch it again") from error
    # JSON of any other form, or none.
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise LrkvError(
            f"{path} is not a safetensors file ({name}: {type(error).__name__}): fetch it again"
        ) from error


def _dtype(path: Path, name: str, kind: Any) -> np.dtype:
    if kind not in FLOATS:
        raise LrkvError(
            f"{path}: {name} is {str(kind)[:20]}, and weights are {', '.join(FLOATS)} here: take "
            "the model that is not quantized"
        )
    return FLOATS[kind]
