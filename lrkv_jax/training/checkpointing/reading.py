"""From a step's directory to arrays on devices, past every check, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from lrkv_jax.distributed.processes import Processes
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import manifest
from lrkv_jax.training.checkpointing.fingerprint import as_hex, fingerprints, named
from lrkv_jax.training.checkpointing.manifest import Damaged


def read_sound(path: Path, abstract: dict[str, Any], processes: Processes) -> dict[str, Any]:
    """The items that `abstract` names, when every check has passed in every process.

    `abstract` holds `jax.ShapeDtypeStruct`s with shardings, of any mesh. First the seal is compared
    with the files, which the processes share out; then the arrays' fingerprints with the bits that
    came to the devices.

    Raises `Damaged`, in all, if one differs, and `LrkvError` for a sound step of other arrays: a
    wrong configuration is not damage.
    """
    content = _together(lambda: _checked(path, set(abstract), processes), processes)
    _check_fits(path, content["arrays"], abstract)
    items = _together(lambda: _loaded(path, abstract), processes)
    for name, found in zip(named(items), as_hex(fingerprints(items)), strict=True):
        if found != content["arrays"][name]["fingerprint"]:
            raise Damaged(f"{name} does not have the bits that were saved")
    return items


def _together(work: Callable[[], Any], processes: Processes) -> Any:
    """What `work` returns here; raises `Damaged` in every process if it does in one."""
    result, reason = None, None
    try:
        result = work()
    except Damaged as damage:
        reason = str(damage)
    if reasons := [text for text in processes.exchange(reason) if text is not None]:
        raise Damaged(reasons[0])
    return result


def _checked(path: Path, items: set[str], processes: Processes) -> dict[str, Any]:
    """The manifest, when this process's share of the files that `items` need are as sealed."""
    content = manifest.read(path)
    needed = [f for f in content["files"] if "/" not in f or f.partition("/")[0] in items]
    share = needed[processes.index :: processes.count]
    manifest.check_files(path, content["files"], share)
    return content


def _loaded(path: Path, abstract: dict[str, Any]) -> dict[str, Any]:
    try:
        return ocp.load_checkpointables(path, abstract)
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise Damaged(f"Orbax cannot read it ({one_line(error)})") from error


def _check_fits(path: Path, saved: dict[str, Any], abstract: dict[str, Any]) -> None:
    for name, leaf in named(abstract).items():
        there = saved.get(name)
        if there is None:
            raise LrkvError(f"checkpoint {path} cannot be read as this model: it has no {name}")
        if there["shape"] != list(leaf.shape) or there["dtype"] != str(leaf.dtype):
            raise LrkvError(
                f"checkpoint {path} cannot be read as this model: {name} is {there['dtype']} "
                f"{there['shape']} there and {leaf.dtype} {list(leaf.shape)} here"
            )


def one_line(error: Exception, directory: Path | None = None) -> str:
    """What a library says went wrong, short; paths are relative to `directory`."""
    text = " ".join(str(error).split())
    if directory is not None:
        text = text.replace(f"{directory}/", "")
    return text[:240] or type(error).__name__
