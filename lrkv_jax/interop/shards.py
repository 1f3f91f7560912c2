"""Tensors in safetensors files, one at a time: https://github.com/huggingface/safetensors#format.

A file is the length of its header (8 bytes), the header (JSON: each tensor's type,
shape and place) and the tensors' bytes. The library's own writer takes a file's tensors
together; here each exists only while it is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

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
        return math.prod(self.shape) * self.dtype.itemsize


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
    if not isinstance(where, dict) or not all(map(_is_shard, where.values())):
        raise LrkvError(
            f"{folder / INDEX} has no weight_map from tensors to *.safetensors beside it: fetch it "
            "again"
        )
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(where.values())) if index is not None else [SINGLE]:
        tensors |= {tensor.name: tensor for tensor in _read_file(folder / name)}
    if absent := sorted(set(where) - set(tensors)):
        raise LrkvError(f"{folder / INDEX} names {absent[0]}, which no file holds: fetch it again")
    return tensors


def _is_shard(name: Any) -> bool:
    """Whether an index may name it: a file in the folder itself."""
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def _read_file(path: Path) -> Iterator[Tensor]:
    """A file's tensors, once all of its header is known to be true of its bytes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(_LONGEST_HEADER, size - 8):
                raise LrkvError(f"{path}: {_TORN}")
            text = file.read(1)
            header = json.loads(text + file.read(length - 1)) if text == b"{" else None
    except OSError as error:
        raise LrkvError(f"{path} cannot be read ({error.strerror}): fetch it again") from error
    except (ValueError, RecursionError) as error:
        raise LrkvError(f"{path} is not a safetensors file ({error}): fetch it again") from error
    if not isinstance(header, dict):
        raise LrkvError(f"{path} is not a safetensors file (it has no header): fetch it again")
    header.pop("__metadata__", None)
    tensors, ends = [], []
    for name, entry in header.items():
        dtype, shape, start, end = _entry(path, name, entry)
        ends.append((start, end))
        tensors.append(Tensor(name, shape, dtype, _mapped(path, dtype, shape, 8 + length + start)))
    # As the format has it: the tensors cover the rest of the file, each byte once.
    before = 0
    for start, end in sorted(ends):
        if start != before:
            raise LrkvError(f"{path}: tensors overlap or leave bytes out at {start}: {_TORN}")
        before = end
    if 8 + length + before != size:
        raise LrkvError(f"{path}: {_TORN}")
    yield from tensors


def _entry(path: Path, name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """A tensor's type, shape and place in the file, checked against each other."""
    entry = entry if isinstance(entry, dict) else {}
    kind, shape, place = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(kind, str) or not _is_numbers(shape) or not _is_numbers(place, 2):
        raise LrkvError(f"{path}: {name} has no dtype, shape and data_offsets: {_TORN}")
    if kind not in FLOATS:
        raise LrkvError(
            f"{path}: {name} is {kind[:20]}, and weights are {', '.join(FLOATS)} here: take the "
            "model that is not quantised"
        )
    dtype, (start, end) = FLOATS[kind], place
    if math.prod(shape) * dtype.itemsize != end - start:
        raise LrkvError(f"{path}: {name} has {end - start} bytes for {shape}: {_TORN}")
    return dtype, tuple(shape), start, end


def _is_numbers(found: Any, count: int | None = None) -> bool:
    """Whether it is a list of whole numbers of 0 or more, `count` of them."""
    if not isinstance(found, list) or count not in (None, len(found)):
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in found)


def _mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...], start: int):
    return lambda: np.memmap(path, dtype, "r", start, shape)
