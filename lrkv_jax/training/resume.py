"""The start of a run: its compiled step, and its state.

The state is from a checkpoint, or fresh, or fresh with the parameters of another run.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from lrkv_jax.config import RunConfig
from lrkv_jax.config.differences import Change, covers
from lrkv_jax.data.loader import Loader
from lrkv_jax.distributed.compilation import Compiled, compile_ahead
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.init_from import initial_state, teacher_of
from lrkv_jax.training.setup import Setup
from lrkv_jax.training.state import TrainState, checkpoint_items, from_checkpoint_items
from lrkv_jax.training.step import make_train_step

# Settings outside `data` that decide which tokens are in which batch.
MAKE_BATCHES = ("train.seq_len", "train.global_batch_size", "train.epochs")


def compiled_step(setup: Setup, abstract: TrainState) -> Compiled:
    """The step, compiled for an `abstract_state` and a batch."""
    train = setup.config.train
    step = make_train_step(setup.config, setup.mesh, setup.token_bytes_V, setup.batch_format)
    tokens = jax.ShapeDtypeStruct(
        (train.global_batch_size, train.seq_len + 1), jnp.int32, sharding=setup.batch_sharding
    )
    return compile_ahead(step, abstract, tokens, mesh=setup.mesh)


def restore_or_init(
    setup: Setup,
    checkpoints: Checkpointer,
    abstract: TrainState,
    allow: Collection[str] = (),
) -> tuple[TrainState, int, list[Change]]:
    """The state of the newest sound checkpoint, its step, and what is `changed_data` since; or a
    fresh state, and 0, if nothing was saved.

    Raises `LrkvError` as `Checkpointer.restore_newest` and `changed_data` do.
    """
    restored = checkpoints.restore_newest(checkpoint_items(abstract))
    if restored is None:
        return initial_state(setup.config, setup.mesh), 0, []
    step, items = restored
    with setup.processes.together():
        changes = changed_data(setup.config, setup.loader, checkpoints.manifest(step), allow)
    teacher = teacher_of(setup.config, setup.mesh)
    return from_checkpoint_items(abstract, items, teacher), step, changes


def data_fingerprints(loader: Loader, step: int) -> dict[str, str]:
    """The data of a run after a step: fingerprints of tokenizer, sources and next batch."""
    return {
        "tokenizer": loader.tokenizer.fingerprint,
        "sources": loader.fingerprint,
        "next_batch": loader.hash_at(step),
    }


def changed_data(
    config: RunConfig, loader: Loader, manifest: dict[str, Any], allow: Collection[str] = ()
) -> list[Change]:
    """The changes of the data since a checkpoint; `allow` permits them.

    Folders may have moved: contents are compared. The next batch is compared unless a change is
    allowed that makes other batches of the same data. Raises `LrkvError` for what is not allowed.
    """
    source = "data.source" if config.data.mixture is None else "data.mixture.folder"
    keys = {"tokenizer": "data.tokenizer", "sources": source, "next_batch": source}
    saved, now = manifest["loader"], data_fingerprints(loader, manifest["step"])
    if any(covers(allow, key) for key in MAKE_BATCHES) or any(k.startswith("data") for k in allow):
        del now["next_batch"]
    changes = []
    for name, mark in now.items():
        if saved.get(name, mark) != mark:
            key = keys[name]
            old = f"{_value(manifest['config'], key)} ({name} {saved[name][:12]})"
            new = f"{_value(config.model_dump(), key)} ({name} {mark[:12]})"
            if not covers(allow, key):
                raise LrkvError(
                    f"the run was trained with {key} = {old}, and it is now {new}: give it what it "
                    f"had, or let the change through with --allow-change {key}"
                )
            changes.append(Change(key, "data", old, new))
    return changes


def records_skipped(setup: Setup, manifest: dict[str, Any]) -> int:
    """Records of an added epoch that no batch has: in their places an earlier one was filled up."""
    before, now = _value(manifest["config"], "train.epochs"), setup.config.train.epochs
    if before is None or now is None or before >= now:
        return 0
    read = manifest["step"] * setup.config.train.global_batch_size
    return max(0, read - before * setup.loader.records)


def order_moved(setup: Setup, manifest: dict[str, Any]) -> str:
    """What a resume with batches of another size does to the order of records, or ""."""
    step, train = manifest["step"], setup.config.train
    before = _value(manifest["config"], "train.global_batch_size")
    length = _value(manifest["config"], "train.seq_len")
    # Of another length there are other records.
    if before in (None, train.global_batch_size) or length != train.seq_len:
        return ""
    now = step * train.global_batch_size
    what = "left out" if now > step * before else "read again"
    return (
        f"{step * before} records were read, and with other batches step {step + 1} begins behind "
        f"{now}: {abs(now - step * before)} are {what}"
    )


def _value(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = (value or {}).get(part)
    return value
