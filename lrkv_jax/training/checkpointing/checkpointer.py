"""The checkpoints of a run: saved while it trains, and restored from the newest that is sound.

A checkpoint holds named items, each a tree of arrays that can be read alone (a training state is
`params`, `optimizer` and `run`). Orbax writes and reads the arrays, sharded, on any mesh. It loads
a flipped byte silently and takes an empty directory for the newest step, so a step here is
what has a manifest whose seal fits its files, and whose arrays have the fingerprints that the
devices computed when it was saved.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from lrkv_jax.distributed.processes import HERE, Processes
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import manifest, shelf
from lrkv_jax.training.checkpointing.fingerprint import as_hex, fingerprints, named
from lrkv_jax.training.checkpointing.manifest import Damaged
from lrkv_jax.training.checkpointing.reading import one_line, read_sound

# For Orbax's processes to wait for each other in a save before it counts as failed.
SAVE_SECONDS = 600
# Written and removed before each save: less than any checkpoint.
PROBE_BYTES = 64 << 10


class Checkpointer:
    """The checkpoints of one run directory.

    Keeps the newest `keep` and the one with the lowest validation loss; an older one goes only
    when a newer one is sealed. `say` gets a line for what fails, from any thread. All `processes`
    of the run make the same calls. Use as a context manager: leaving it waits for the save in
    progress.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int = 2,
        say: Callable[[str], None] | None = None,
        processes: Processes | None = None,
    ):
        for noisy in ("absl", "orbax"):  # what fails is raised too, and reported in one line
            logging.getLogger(noisy).setLevel(logging.CRITICAL)
        self.directory = Path(directory).absolute()
        self.failures = 0  # saves that failed since the run was started
        self._keep, self._processes = keep, processes or HERE.as_jax_knows()
        self._say = say or (
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
            shelf.sweep(self.directory)

    def steps(self) -> list[int]:
        """The steps that were saved whole, in order; `restore` says whether they still are."""
        there = shelf.numbered(self.directory).items()
        return [step for step, path in there if (path / manifest.NAME).is_file()]

    def agreed(self, *, whole: bool = True) -> list[int]:
        """The steps, or with `whole` False all that claim to be, as process 0 sees them.

        Two hosts may see a network file system differently, and would then wait for each other.
        """
        seen = self.steps() if whole else list(shelf.numbered(self.directory))
        return self._processes.exchange(seen)[0]

    def latest(self) -> int | None:
        """The newest step, or None."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the lowest validation loss among those kept, or None."""
        return best_of(self.directory, self.steps())

    def manifest(self, step: int | None = None) -> dict[str, Any]:
        """What a step (the newest, unless given) says about itself: configuration, tokens, arrays.

        Raises `LrkvError` if there is no such step or its manifest is damaged.
        """
        path = self._path(self._newest() if step is None else step)
        try:
            return manifest.read(path)
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
        if step in self.agreed():
            return
        if self._fails(step, first):
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
            "versions": manifest.versions(),
            "arrays": arrays,
        }
        words = fingerprints(items)
        written = shelf.saving(self.directory, step)
        try:
            context = ocp.Context()
            context.asynchronous.timeout_secs = SAVE_SECONDS
            with context:
                response = ocp.save_checkpointables_async(written, dict(items))
        except Exception as error:  # whatever a file system and Orbax raise; training continues
            self._failed(step, error)
            return

        def finish() -> None:
            try:
                response.result()
                if self._processes.index == 0:
                    self._seal(written, content, as_hex(words))
            except Exception as error:
                self._failed(step, error)

        self._saving = threading.Thread(target=finish, name=f"save of step {step}")
        self._saving.start()

    def _fails(self, step: int, first: Callable[[], None]) -> bool:
        """Whether `first`, or making a directory, fails in some process: the save fails in all."""
        reason = ""
        try:
            first()
            if self._processes.index == 0:
                # Also what threads of Orbax have written since the last save failed.
                shelf.sweep(self.directory)
                # Orbax, refused this, leaves threads that wait for minutes, or go on writing.
                probe = shelf.saving(self.directory, step)
                probe.mkdir(parents=True)
                (probe / "probe").write_bytes(bytes(PROBE_BYTES))
                shelf.sweep(self.directory)
        except OSError as error:
            reason = one_line(error)
        if reasons := [text for text in self._processes.exchange(reason) if text]:
            self._failed(step, OSError(reasons[0]))
        return bool(reasons)

    def wait(self) -> None:
        """Return when the save in progress is sealed, or has failed."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None
        if self._started:
            self._started = False
            # Process 0 has sealed it: all see the same steps from here.
            self._processes.exchange(None)

    def restore(
        self, abstract: dict[str, Any], step: int | None = None
    ) -> tuple[int, dict[str, Any]]:
        """The step and the items that `abstract` names, of `step` or of the newest sound one.

        `abstract` holds `jax.ShapeDtypeStruct`s with shardings, of any mesh. Damaged steps are
        passed over and reported, unless `step` names one. Raises `LrkvError` if there is no such
        step, it holds other arrays, or none is sound.
        """
        if step is None:
            newest = self.restore_newest(abstract)
            if newest is None:
                self._newest()  # raises: there is none
            return newest
        path = self._path(step)
        try:
            return step, read_sound(path, abstract, self._processes)
        except Damaged as damage:
            there = ", ".join(map(str, self.steps()))
            raise LrkvError(
                f"checkpoint {path} is damaged: {damage}; there are steps {there}"
            ) from damage

    def restore_newest(self, abstract: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        """The newest sound step and its items; None if nothing was saved yet.

        What is damaged is reported and moved to `damaged/`, once a sound one is found, and what a
        killed save left is removed. Raises `LrkvError` if there are checkpoints and none is sound:
        nothing starts from scratch unasked.
        """
        unsound: dict[int, str] = {}
        for step in reversed(self.agreed(whole=False)):
            try:
                items = read_sound(self.directory / str(step), abstract, self._processes)
            except Damaged as damage:
                if self._is_gone(step):  # a run that trains meanwhile has deleted it: look again
                    return self.restore_newest(abstract)
                unsound[step] = str(damage)
                continue
            for damaged, reason in unsound.items():
                self._pass_over(damaged, reason)
            self._sweep()
            return step, items
        aside = shelf.set_aside_there(self.directory)
        if not unsound and not aside:
            self._sweep()
            return None
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in unsound.items())
        aside_names = ", ".join(path.name for path in aside)
        raise LrkvError(
            f"no checkpoint under {self.directory} is sound"
            + (f" ({reasons})" if reasons else "")
            + (f"; set aside before: {aside_names}" if aside else "")
            + ": copy a sound one back, or delete the directory to start again from step 0"
        )

    def _is_gone(self, step: int) -> bool:
        there = (self.directory / str(step)).exists()
        return not self._processes.exchange(there)[0]

    def _sweep(self) -> None:
        if self._processes.index == 0:
            shelf.sweep(self.directory)

    def _pass_over(self, step: int, reason: str) -> None:
        if self._processes.index != 0:
            return
        path = self.directory / str(step)
        try:
            outcome = f"set aside as {shelf.set_aside(path)}"
        except OSError as error:
            outcome = f"passed over and left there ({error.strerror})"
        self._say(f"checkpoint {path} is damaged: {reason}; {outcome}")

    def _seal(self, written: Path, content: dict[str, Any], words: list[str]) -> None:
        """Read back what was written, note what it is, and make it a step."""
        for array, word in zip(content["arrays"].values(), words, strict=True):
            array["fingerprint"] = word
        files = manifest.seal(written)
        manifest.write(written, {**content, "saved": time.time(), "files": files})
        shelf.publish(written, content["step"])
        try:
            self._prune()
        except OSError as error:
            self._say(f"an old checkpoint cannot be deleted ({one_line(error)})")

    def _prune(self) -> None:
        steps = self.steps()
        stays = {*steps[-self._keep :], best_of(self.directory, steps)}
        for step in steps:
            if step not in stays:
                shelf.delete(self.directory / str(step))

    def _failed(self, step: int, error: Exception) -> None:
        self.failures += 1
        self._processes.end_at_once = True
        newest = self.latest()
        left = "there is none yet" if newest is None else f"the newest is of step {newest}"
        text = (
            f"CHECKPOINT OF STEP {step} FAILED ({one_line(error, self.directory)}): training "
            f"continues, {left}; {self.failures} failed so far"
        )
        self._say(text)
        if self._processes.index == 0:
            shelf.sweep(self.directory)

    def _newest(self) -> int:
        newest = self.latest()
        if newest is None:
            raise LrkvError(f"no checkpoint under {self.directory}: train the run first")
        return newest

    def _path(self, step: int) -> Path:
        steps = self.steps()
        if step not in steps:
            self._newest()  # raises if there is none at all
            raise LrkvError(f"no checkpoint of step {step}: there are {', '.join(map(str, steps))}")
        return self.directory / str(step)


def best_of(directory: Path, steps: list[int]) -> int | None:
    """The step with the lowest finite validation loss among those with a manifest, or None."""
    losses = {}
    for step in steps:
        try:
            loss = manifest.read(directory / str(step))["validation_loss"]
        except (Damaged, KeyError):
            continue
        if loss is not None and math.isfinite(loss):
            losses[step] = loss
    return min(losses, key=losses.get, default=None)
