"""Tensors in safetensors files, one at a time: https://github.com/huggingface/safetensors#format.

A file is the length of its header (8 bytes), the header (JSON: each tensor's type, shape and place)
and the tensors' bytes. The library's own writer takes a file's tensors together; here each exists
only while it is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from lrkv_jax.disk import read_json, write_json
from lrkv_jax.errors import LrkvError

FLOATS: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": jnp.dtype(jnp.bfloat16),
}
NAMES = {dtype: name for name, dtype in FLOATS.items()}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # the format's own limit
_TORN = "the file is torn: fetch it again"


@dataclass(frozen=True)
class Tensor:
    """A tensor that is made, or read, when it is asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def write(folder: Path, tensors: Iterable[Tensor], largest: int) -> None:
    """Write tensors as model.safetensors, or as several files of at most `largest` bytes and their
    index; a tensor that is larger has a file of its own."""
    files: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(one.nbytes for one in files[-1]) + tensor.nbytes > largest:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        _write_file(folder / SINGLE, files[0])
        return
    where: dict[str, str] = {}
    for number, held in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(folder / name, held)
        where |= {tensor.name: name for tensor in held}
    total = sum(tensor.nbytes for held in files for tensor in held)
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
            array.view(np.uint8).tofile(file) if array.ndim else file.write(array.tobytes())


def read(folder: Path) -> dict[str, Tensor]:
    """A folder's tensors by name; their bytes are mapped, and read when they are asked for.

    Raises `LrkvError` for a folder without tensors, a torn file and types that are not floats.
    """
    index = read_json(folder / INDEX, "fetch it again")
    if index is None and not (folder / SINGLE).is_file():
        others = sorted(path.name for path in folder.glob("*.bin"))
        has = f"it has {others[0]}: convert it with transformers" if others else "fetch them"
        raise LrkvError(f"{folder} has no {SINGLE} and no {INDEX}: {has}")
    where = index.get("weight_map") if index is not None else {}
    if not isinstance(where, dict):
        raise LrkvError(f"{folder / INDEX} has no weight_map: fetch it again")
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(where.values())) if index is not None else [SINGLE]:
        tensors |= {tensor.name: tensor for tensor in _read_file(folder / name)}
    if absent := sorted(set(where) - set(tensors)):
        raise LrkvError(f"{folder / INDEX} names {absent[0]}, which no file holds: fetch it again")
    return tensors


def _read_file(path: Path) -> Iterator[Tensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(_LONGEST_HEADER, size - 8):
                raise LrkvError(f"{path}: {_TORN}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        places = {name: entry["data_offsets"] for name, entry in header.items()}
        if 8 + length + max((end for _, end in places.values()), default=0) != size:
            raise LrkvError(f"{path}: {_TORN}")
    except OSError as error:
        raise LrkvError(f"{path} cannot be read ({error.strerror}): fetch it again") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LrkvError(f"{path} is not a safetensors file ({error}): fetch it again") from error
    for name, entry in header.items():
        shape, (start, end) = tuple(entry["shape"]), places[name]
        if entry["dtype"] not in FLOATS:
            raise LrkvError(
                f"{path}: {name} is {entry['dtype']}, and weights are {', '.join(FLOATS)} here: "
                "take the model that is not quantised"
            )
        dtype = FLOATS[entry["dtype"]]
        if int(np.prod(shape)) * dtype.itemsize != end - start:
            raise LrkvError(f"{path}: {name} has {end - start} bytes for {list(shape)}: {_TORN}")
        yield Tensor(name, shape, dtype, _mapped(path, dtype, shape, 8 + length + start))


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...], start: int):
    return lambda: np.memmap(path, dtype, "r", start, shape)
