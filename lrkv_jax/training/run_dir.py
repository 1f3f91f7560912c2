"""A run's directory: config.yaml, history.jsonl, metrics.jsonl, events/, checkpoints/, samples/.

config.yaml is what the run does now, history.jsonl how it came to that: each start and each setting
that was changed, with the step.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lrkv_jax import __version__, files
from lrkv_jax.config import RunConfig, dump_config, load_config
from lrkv_jax.config.differences import Change, check_keys, covers, differences
from lrkv_jax.config.frozen import ROLES
from lrkv_jax.config.history import read_history
from lrkv_jax.distributed.hardware import device_name, usable_cores
from lrkv_jax.distributed.processes import HERE, Processes
from lrkv_jax.errors import EXIT_UNAVAILABLE, LrkvError

# Orbax looks for its files by a pattern that begins with the path, and TensorStore takes no \.
_UNREADABLE = re.compile(r"\[[^/]+\]|\*\*|\\")
# What `fcntl.lockf` raises while another process has the lock.
_IS_HELD = (errno.EACCES, errno.EAGAIN)
# The locks of this process: closing any other descriptor of such a file would free its lock.
_held: set[Path] = set()


def open_run(config: RunConfig, allow: Collection[str] = (), processes: Processes = HERE) -> Path:
    """Make the run's directory, or accept one that the same run left.

    Writes config.yaml if there is none. Raises `LrkvError`, and writes nothing, if the directory
    cannot be one, is not a run's, or holds a run with another setting that changes its result and
    that `allow` does not name; of several processes, if one does not see what process 0 has
    written.
    """
    directory = Path(config.directory)
    with processes.together():
        check_keys(config, allow)
        if found := _UNREADABLE.search(str(directory.absolute())):
            raise LrkvError(
                f"run_dir = {directory}: no checkpoint can be read under a path with {found[0]}: "
                "give another run_dir=PATH"
            )
        if processes.index == 0:
            try:
                _claim(directory, config, allow)
            except OSError as error:
                raise unusable(directory, error) from error
    try:
        blind = processes.without_access_to(directory)
    except OSError as error:
        raise unusable(directory, error) from error
    with processes.together():
        if blind and processes.index == 0:
            raise LrkvError(
                f"{blind[0]} does not see {directory}, where process 0 writes: set run_dir=PATH on "
                "a file system that all hosts share"
            )
    return directory


def _claim(directory: Path, config: RunConfig, allow: Collection[str]) -> None:
    saved = directory / "config.yaml"
    if saved.is_file():
        check_same(directory, config, allow)
        return
    # A kill during the write below leaves such a file.
    half = set(directory.glob(".config.yaml.*.part"))
    if directory.exists() and set(directory.iterdir()) - half:
        raise LrkvError(f"{directory} exists and is not a run: give another run_dir=PATH")
    directory.mkdir(parents=True, exist_ok=True)
    for file in half:
        file.unlink()
    files.write(saved, dump_config(config))


def unusable(directory: Path, error: OSError) -> LrkvError:
    """The error for a run's directory that cannot be made or written."""
    text = f"run_dir = {directory} cannot be written ({error.strerror})"
    if os.path.isfile(directory / "config.yaml"):  # another directory would be another run
        fix = "free space or let it be written, and the same command resumes its run"
        return LrkvError(f"{text}: {fix}", EXIT_UNAVAILABLE)
    return LrkvError(f"{text}: give another run_dir=PATH")


def check_same(
    directory: Path, config: RunConfig, allow: Collection[str] = (), *, fix: str = ""
) -> None:
    """Raise `LrkvError` if the directory's run has another setting that changes its result.

    `allow` lets settings through. `fix` is what the message says instead of how `lrkv train` does.
    """
    for change in differences(load_config(directory / "config.yaml"), config, ["semantics"]):
        longer = change.key == "train.steps" and change.new > change.old
        if not longer and not covers(allow, change.key):
            ways = fix or "leave it as it was, or give this run its own run_dir=PATH"
            saved = load_config(directory / "config.yaml")
            if not fix and _array_shapes(config) == _array_shapes(saved):
                ways += f", or let the change through with --allow-change {change.key}"
            raise LrkvError(
                f"{directory} was trained with {change.key} = {change.old}, and {change.new} is "
                f"asked for: {ways}"
            )


def _array_shapes(config: RunConfig) -> dict[str, Any]:
    """The names, shapes and dtypes of a checkpoint's arrays."""
    import jax

    from lrkv_jax.training.state import checkpoint_items, new_state, resolve

    items = jax.eval_shape(lambda: checkpoint_items(new_state(resolve(config))))
    leaves, _ = jax.tree.flatten_with_path(items)
    return {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype) for path, leaf in leaves}


def record_start(
    config: RunConfig, step: int, data: Sequence[Change], processes: Processes, devices: int,
    asked_dtype: str,
) -> list[str]:  # fmt: skip
    """Write into the run's history that it starts at a step, on what, and what changes from there.

    `data` is what has another content, `asked_dtype` is `model.dtype` before auto became another.
    Makes config.yaml what the run does now. Returns the changes as lines. Raises `LrkvError` where
    the directory cannot be written.
    """
    directory, lines = Path(config.directory), []
    with processes.together():
        if processes.index == 0:
            settings = differences(load_config(directory / "config.yaml"), config, tuple(ROLES))
            same = {change.key for change in data}
            now = datetime.now(UTC).isoformat(timespec="seconds")
            begin = {"time": now, "step": step, "event": "start"}
            begin |= {"device": device_name(), "devices": devices, "cores": usable_cores()}
            begin |= {"versions": {"lrkv_jax": __version__, "jax": version("jax")}}
            begin |= {"dtype": config.model.dtype, "asked_dtype": asked_dtype}
            rows = [*read_history(directory), begin]
            for change in [*settings, *data]:
                # A folder that moved, and whose content is as it was.
                moved = change.role == "data" and change.key not in same
                role = "placement" if moved else change.role
                what = vars(change) | {"role": role}
                rows.append({"time": now, "step": step, "event": "change", **what})
                lines.append(f"from step {step} on, {change.key} is {change.new}, not {change.old}")
            try:
                text = "".join(f"{json.dumps(row, default=_plain)}\n" for row in rows)
                files.write(directory / "history.jsonl", text)
                if settings:
                    files.write(directory / "config.yaml", dump_config(config))
            except OSError as error:
                raise unusable(directory, error) from error
    return lines


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json")


def read_run(directory: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> RunConfig:
    """The configuration that a run was trained with; raises `LrkvError` if there is no run."""
    saved = Path(directory) / "config.yaml"
    if not saved.is_file():
        raise LrkvError(f"{directory} is not a run: it has no config.yaml")
    return load_config(saved, overrides).model_copy(update={"run_dir": str(directory)})


def is_training(directory: str | Path) -> bool:
    """Whether a process, of this host or of one that shares its locks, trains the run now."""
    path = _lock_of(directory)
    if path in _held:
        return True
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _IS_HELD
    finally:
        os.close(file)
    return False


def _lock_of(run_dir: str | Path) -> Path:
    """The lock of a run under its one name, whatever links lead there."""
    return Path(os.path.realpath(run_dir)) / "lock"


class RunLock:
    """The right to train in a directory, held while this context manager is entered.

    The file `lock` names its holder and is locked by it (`fcntl.lockf`: the kernel, or an NFS
    server, frees it when the process ends; children do not inherit it). On a file system that
    passes no locks between hosts, a second trainer is only seen on the same host. Of several
    `processes`, process 0 holds it for all. Entering raises `LrkvError`, in all processes, while
    another run holds it.
    """

    def __init__(self, run_dir: str | Path, processes: Processes):
        self._run_dir, self.path, self._processes = Path(run_dir), _lock_of(run_dir), processes
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        with self._processes.together():
            if self._processes.index == 0:
                try:
                    self._file = self._locked()
                except OSError as error:
                    raise unusable(self._run_dir, error) from error
        return self

    def __exit__(self, *_) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()
            os.close(self._file)  # frees it
            _held.discard(self.path)

    def _locked(self) -> int:
        """A descriptor of the file, locked by this process where the file system has locks."""
        if self.path in _held:
            raise self._taken("this process")
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _IS_HELD:
                holder = os.pread(file, 4096, 0).decode(errors="replace").strip()
                os.close(file)
                raise self._taken(holder or "another process") from None
            # The file system has no locks: nothing keeps a second trainer away.
        if not self._is_at_its_path(file):  # its holder has ended, and removed it, meanwhile
            os.close(file)
            return self._locked()
        with contextlib.suppress(OSError):  # a full disk: the kernel's lock remains
            os.truncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _held.add(self.path)
        return file

    def _taken(self, holder: str) -> LrkvError:
        return LrkvError(
            f"{self._run_dir} is being trained by {holder}: wait for it to end, or give this run "
            "its own run_dir=PATH",
            EXIT_UNAVAILABLE,
        )

    def _is_at_its_path(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self.path.stat())
        except FileNotFoundError:
            return False
