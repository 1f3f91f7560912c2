"""The checkpoints of a run: saved while it trains, and restored from the newest that is sound.

A checkpoint holds named items, each a tree of arrays that can be read alone (a training state is
`params`, `optimizer` and `run`). Orbax writes and reads the arrays, sharded, on any mesh. It loads
a flipped byte silently, and takes an empty directory for the newest step. So a step here has a
manifest whose checksums fit its files, and its arrays have the fingerprints that the devices
computed when it was saved.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from lrkv_jax.distributed.processes import HERE, Processes
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import layout
from lrkv_jax.training.checkpointing.fingerprint import as_hex, fingerprints, named
from lrkv_jax.training.checkpointing.layout import Damaged

# For Orbax's processes to wait for each other in a save before it counts as failed.
SAVE_SECONDS = 600
# Written and removed before each save: less than any checkpoint.
PROBE_BYTES = 64 << 10


# What makes the batches of a validation, by its place in the manifest.
_MAKE_VALIDATION = {
    "train": (
        "validation_batches", "global_batch_size", "seq_len", "document_mask", "document_positions",
    ),
    "data": ("heldout", "heldout_shards", "text_column"),
    "loader": ("sources", "tokenizer"),
}  # fmt: skip


class Checkpointer:
    """The checkpoints of one run directory.

    Keeps the newest `max_to_keep` and the one with the lowest validation loss; an older one is
    deleted only when a newer one is complete. `warn` gets a line for what fails, from any thread.
    All `processes` of the run make the same calls. Use as a context manager: leaving it waits for
    the save in progress.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        max_to_keep: int = 2,
        warn: Callable[[str], None] | None = None,
        processes: Processes | None = None,
    ):
        self.directory = Path(directory).absolute()
        self.failures = 0  # saves that failed since the run was started
        self._max_to_keep, self._processes = max_to_keep, processes or HERE.as_jax_knows()
        self._warn = warn or (
            lambda text: print(f"lrkv: {self._processes.who()}{text}", file=sys.stderr)
        )
        self._saving: threading.Thread | None = None
        self._started = False  # a save, whether or not it got as far as a thread

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.wait()
        elif self._saving is not None:  # the others may not come any more
            self._saving.join()
        if self.failures and self._processes.index == 0:
            layout.sweep(self.directory)

    def steps(self) -> list[int]:
        """The steps whose save was completed, in order; `restore` finds out if one is damaged."""
        there = layout.numbered(self.directory).items()
        return [step for step, path in there if (path / layout.MANIFEST).is_file()]

    def agreed(self, *, complete: bool = True) -> list[int]:
        """The steps as process 0 sees them; or all that claim to be steps.

        Two hosts may see a network file system differently, and would then wait for each other.
        """
        seen = self.steps() if complete else list(layout.numbered(self.directory))
        return self._processes.exchange(seen)[0]

    def best(self) -> int | None:
        """The step with the lowest validation loss among those kept, or None."""
        return best_of(self.directory, self.steps())

    def path(self, step: int | None = None) -> Path:
        """The directory of a step (by default the newest); raises `LrkvError` if there is none."""
        steps = self.steps()
        if not steps:
            raise LrkvError(f"no checkpoint under {self.directory}: train the run first")
        if step is not None and step not in steps:
            there = ", ".join(map(str, steps))
            raise LrkvError(f"no checkpoint of step {step} in {self.directory}: there are {there}")
        return self.directory / str(steps[-1] if step is None else step)

    def manifest(self, step: int | None = None) -> dict[str, Any]:
        """The manifest of a step (by default the newest): configuration, tokens, arrays.

        Raises `LrkvError` if there is no such step or its manifest is damaged.
        """
        path = self.path(step)
        try:
            return layout.read_manifest(path)
        except Damaged as damage:
            raise LrkvError(f"checkpoint {path} is damaged: {damage}") from damage

    def save(
        self,
        step: int,
        items: dict[str, Any],
        about: dict[str, Any],
        validation_loss: float | None = None,
        first: Callable[[], None] = lambda: None,
    ) -> None:
        """Start saving; returns once the arrays are copied, before they are written.

        `about` is JSON for the manifest; `first` is what must succeed before. A step that is there
        already is left alone. A save that fails is reported and counted, and leaves what was there
        before; it raises nothing.
        """
        self.wait()
        if step in self.agreed() or self._fails(step, first):
            return
        self._started = True
        arrays = {
            name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "bytes": leaf.nbytes}
            for name, leaf in named(items).items()
        }
        content = {
            "step": step,
            **about,
            "validation_loss": validation_loss,
            "versions": layout.versions(),
            "arrays": arrays,
        }
        digests = fingerprints(items)
        folder = layout.saving(self.directory, step)
        try:
            context = ocp.Context()
            context.asynchronous.timeout_secs = SAVE_SECONDS
            with context:
                response = ocp.save_checkpointables_async(folder, dict(items))
        except Exception as error:  # whatever a file system and Orbax raise; training continues
            self._failed(step, error)
            return

        def finish() -> None:
            try:
                response.result()
                if self._processes.index == 0:
                    self._publish(folder, content, as_hex(digests))
            except Exception as error:
                self._failed(step, error)

        self._saving = threading.Thread(target=finish, name=f"save of step {step}")
        self._saving.start()

    def validated(self, step: int, loss: float) -> None:
        """Add the validation loss of a step whose save came first. Raises `OSError`."""
        path = self.directory / str(step)
        content = layout.read_manifest(path)
        layout.write_manifest(path, content | {"validation_loss": loss})
        self._prune()

    def _fails(self, step: int, first: Callable[[], None]) -> bool:
        """Whether `first`, or making a directory, fails in some process: the save fails in all."""
        reason = ""
        try:
            first()
            if self._processes.index == 0:
                # Also what threads of Orbax have written since the last save failed.
                layout.sweep(self.directory)
                # Orbax, refused this, leaves threads that wait for minutes, or go on writing.
                probe = layout.saving(self.directory, step)
                probe.mkdir(parents=True)
                (probe / "probe").write_bytes(bytes(PROBE_BYTES))
                layout.sweep(self.directory)
        except OSError as error:
            reason = one_line(error)
        if reasons := [text for text in self._processes.exchange(reason) if text]:
            self._failed(step, OSError(reasons[0]))
        return bool(reasons)

    def wait(self) -> None:
        """Return when the save in progress is complete, or has failed."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        if self._started:
            self._started = False
            # Process 0 has published it: all see the same steps from here.
            self._processes.exchange(None)

    def restore(
        self, abstract: dict[str, Any], step: int | None = None
    ) -> tuple[int, dict[str, Any]]:
        """The step and the items that `abstract` names, of `step` or of the newest sound one.

        `abstract` holds `jax.ShapeDtypeStruct`s with shardings, of any mesh. Damaged steps are
        passed over and reported, unless `step` names one. Nothing on the disk changes: the run may
        be training. Raises `LrkvError` if there is no such step, it holds other arrays, or none is
        sound.
        """
        if step is None:
            newest, unsound = self._newest_sound(abstract)
            if newest is None:
                self.path()  # raises: there is none
            for damaged, reason in unsound.items():
                self._warn_of(damaged, reason, "passed over")
            return newest
        path = self.path(step)
        try:
            return step, read_verified(path, abstract, self._processes)
        except Damaged as damage:
            there = ", ".join(map(str, self.steps()))
            raise LrkvError(
                f"checkpoint {path} is damaged: {damage}; there are steps {there}"
            ) from damage

    def restore_newest(self, abstract: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        """The newest sound step and its items; None if nothing was saved yet.

        For the run's trainer alone, which holds its lock: what is damaged is reported and moved to
        `damaged/`, once a sound one is found, and what a killed save left is removed. Raises
        `LrkvError` if there are checkpoints and none is sound: nothing starts from scratch unasked.
        """
        newest, unsound = self._newest_sound(abstract)
        if self._processes.index == 0:
            for step, reason in unsound.items():
                self._set_aside(step, reason)
            layout.sweep(self.directory)
        return newest

    def _newest_sound(
        self, abstract: dict[str, Any]
    ) -> tuple[tuple[int, dict[str, Any]] | None, dict[int, str]]:
        """What `restore_newest` returns, and why each newer step is damaged."""
        unsound: dict[int, str] = {}
        for step in reversed(self.agreed(complete=False)):
            try:
                items = read_verified(self.directory / str(step), abstract, self._processes)
            except Damaged as damage:
                there = (self.directory / str(step)).exists()
                if not self._processes.exchange(there)[0]:  # deleted by a run that trains meanwhile
                    return self._newest_sound(abstract)
                unsound[step] = str(damage)
                continue
            return (step, items), unsound
        damaged = sorted((self.directory / layout.DAMAGED).glob("*"))
        if not unsound and not damaged:
            with self._processes.together():
                if self.directory.is_symlink() and not self.directory.exists():
                    raise LrkvError(
                        f"{self.directory} links to what is not there: mount that, or delete the "
                        "link to start again from step 0"
                    )
            return None, {}
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in unsound.items())
        damaged_names = ", ".join(path.name for path in damaged)
        with self._processes.together():  # all have failed: process 0 reports it
            raise LrkvError(
                f"no checkpoint under {self.directory} is sound"
                + (f" ({reasons})" if reasons else "")
                + (f"; set aside before: {damaged_names}" if damaged else "")
                + ": copy a sound one back, or delete the directory to start again from step 0"
            )

    def _set_aside(self, step: int, reason: str) -> None:
        try:
            outcome = f"set aside as {layout.set_aside(self.directory / str(step))}"
        except OSError as error:
            outcome = f"passed over and left there ({error.strerror})"
        self._warn_of(step, reason, outcome)

    def _warn_of(self, step: int, reason: str, outcome: str) -> None:
        if self._processes.index == 0:
            self._warn(f"checkpoint {self.directory / str(step)} is damaged: {reason}; {outcome}")

    def _publish(self, folder: Path, content: dict[str, Any], digests: list[str]) -> None:
        """Checksum the files, write the manifest, and make it a step."""
        for array, digest in zip(content["arrays"].values(), digests, strict=True):
            array["fingerprint"] = digest
        files = layout.checksums(folder)
        for item in {name.partition("/")[0] for name in content["arrays"]}:
            if f"{item}/manifest.ocdbt" not in files:
                raise OSError(f"Orbax has not merged the files of {item}")
        layout.write_manifest(folder, {**content, "saved": time.time(), "files": files})
        layout.publish(folder, content["step"])
        with contextlib.suppress(OSError):  # in it launch/slurm.sbatch counts starts in vain
            os.unlink(os.environ.get("LRKV_FAILURES", ""))
        try:
            self._prune()
        except OSError as error:
            self._warn(f"an old checkpoint cannot be deleted ({one_line(error)})")

    def _prune(self) -> None:
        steps = self.steps()
        stays = {*steps[-self._max_to_keep :], best_of(self.directory, steps)}
        for step in steps:
            if step not in stays:
                layout.delete(self.directory / str(step))

    def _failed(self, step: int, error: Exception) -> None:
        self.failures += 1
        self._processes.end_at_once = True
        steps = self.steps()
        left = f"the newest is of step {steps[-1]}" if steps else "there is none yet"
        self._warn(
            f"CHECKPOINT OF STEP {step} FAILED ({one_line(error, self.directory)}): training "
            f"continues, {left}; {self.failures} failed so far"
        )
        if self._processes.index == 0:
            layout.sweep(self.directory)


def best_of(directory: Path, steps: list[int]) -> int | None:
    """The step with the lowest finite validation loss among those with a manifest, or None.

    Steps that were validated on other batches than the newest one are left out.
    """
    losses: dict[int, float] = {}
    batches = None
    for step in sorted(steps, reverse=True):
        try:
            manifest = layout.read_manifest(directory / str(step))
            loss = manifest["validation_loss"]
        except (Damaged, KeyError):
            continue
        if loss is not None and math.isfinite(loss):
            groups = {**manifest.get("config", {}), "loader": manifest.get("loader", {})}
            of = {
                name: groups.get(group, {}).get(name)
                for group, names in _MAKE_VALIDATION.items()
                for name in names
            }
            batches = batches or of
            if of == batches:
                losses[step] = loss
    return min(losses, key=lambda step: losses[step], default=None)


def read_verified(path: Path, abstract: dict[str, Any], processes: Processes) -> dict[str, Any]:
    """The items that `abstract` names, when every check has passed in every process.

    `abstract` holds `jax.ShapeDtypeStruct`s with shardings, of any mesh. First the checksums
    are compared with the files, which the processes share out; then the arrays' fingerprints with
    the bits that came to the devices.

    Raises `Damaged`, in all, if one differs, and `LrkvError` for a sound step of other arrays: a
    wrong configuration is not damage.
    """
    content = _together(lambda: _checked(path, set(abstract), processes), processes)
    with processes.together():
        _check_fits(path, content["arrays"], abstract)
    items = _together(lambda: _loaded(path, abstract), processes)
    for name, found in zip(named(items), as_hex(fingerprints(items)), strict=True):
        if found != content["arrays"][name]["fingerprint"]:
            raise Damaged(f"{name} does not have the bits that were saved")
    return items


def _together(work: Callable[[], Any], processes: Processes) -> Any:
    """The result of `work` here; raises `Damaged` in every process if it does in one."""
    result, reason = None, None
    try:
        result = work()
    except Damaged as damage:
        reason = str(damage)
    if reasons := [text for text in processes.exchange(reason) if text is not None]:
        raise Damaged(reasons[0])
    return result


def _checked(path: Path, items: set[str], processes: Processes) -> dict[str, Any]:
    """The manifest, when this process's share of the files that `items` need are unchanged."""
    content = layout.read_manifest(path)
    needed = [f for f in content["files"] if "/" not in f or f.partition("/")[0] in items]
    share = needed[processes.index :: processes.count]
    layout.check_files(path, content["files"], share)
    return content


def _loaded(path: Path, abstract: dict[str, Any]) -> dict[str, Any]:
    try:
        return ocp.load_checkpointables(path, abstract)
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise Damaged(f"Orbax cannot read it ({one_line(error)})") from error


def _check_fits(path: Path, saved: dict[str, Any], abstract: dict[str, Any]) -> None:
    wanted = named(abstract)
    for name in saved:
        if name not in wanted and name.partition("/")[0] in abstract:
            raise LrkvError(
                f"checkpoint {path} cannot be read as this model: it has {name} as well"
            )
    for name, leaf in wanted.items():
        there = saved.get(name)
        if there is None:
            raise LrkvError(f"checkpoint {path} cannot be read as this model: it has no {name}")
        if there["shape"] != list(leaf.shape) or there["dtype"] != str(leaf.dtype):
            raise LrkvError(
                f"checkpoint {path} cannot be read as this model: {name} is {there['dtype']} "
                f"{there['shape']} there and {leaf.dtype} {list(leaf.shape)} here"
            )


def one_line(error: Exception, directory: Path | None = None) -> str:
    """A library's error message, shortened; paths are relative to `directory`."""
    text = " ".join(str(error).split())
    if directory is not None:
        text = text.replace(f"{directory}/", "")
    return text[:240] or type(error).__name__
