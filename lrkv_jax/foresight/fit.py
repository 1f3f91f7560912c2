"""Whether a step fits a device's memory, and the smallest change of settings that makes it fit."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from lrkv_jax.config import MeshConfig, RunConfig
from lrkv_jax.config.schema import TrainConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.foresight.step import Memory, memory, sizes_of, state_bytes
from lrkv_jax.runtime.xla import MEMORY_FRACTION
from lrkv_jax.sharding import AXES

# Of a device's memory: what `lrkv train` lets JAX take.
USABLE = float(MEMORY_FRACTION)
# How far the plan and XLA may be apart: docs/planning.md has what was measured.
WITHIN = 0.10
MOST_DEVICES = 1024  # that a suggestion asks for
Change = dict[str, Any]  # dotted settings


@dataclass(frozen=True)
class Verdict:
    """Bytes that a device of the run needs and has.

    Where it does not fit, `change` are the settings that would make it, and `needs_then` what it
    would need; None if nothing tried does.
    """

    needs: int
    has: int
    change: Change | None = None
    needs_then: int | None = None

    @property
    def fits(self) -> bool:
        return self.needs <= self.has

    def sentence(self, mesh: MeshConfig) -> str:
        """One line, as in `lrkv plan` and in the error of `check_memory`."""
        devices = math.prod(sizes_of(mesh).values())
        device = "the device" if devices == 1 else f"each of the {devices} devices"
        if self.fits:
            return f"{device} needs {gigabytes(self.needs)} and has {gigabytes(self.has)}: it fits"
        start = (
            f"{device} ({shown(mesh)}) needs {gigabytes(self.needs)} for a training step and has "
            f"{gigabytes(self.has)}, {gigabytes(self.needs - self.has)} too little"
        )
        if self.change is None:
            return f"{start}: no change of remat, accumulation, mesh or moments that was tried fits"
        return f"{start}: {self.settings(mesh)} would fit, with {gigabytes(self.needs_then)}"

    def settings(self, mesh: MeshConfig) -> str:
        """The change as it is typed, and how many devices it asks for if that differs."""
        typed = " ".join(f"{key}={value}" for key, value in self.change.items())
        sizes = sizes_of(mesh)
        then = sizes | {
            key.removeprefix("mesh."): value
            for key, value in self.change.items()
            if key.startswith("mesh.")
        }
        devices = math.prod(then.values())
        return typed if devices == math.prod(sizes.values()) else f"{typed} on {devices} devices"


def gigabytes(count: int | float) -> str:
    """61.2 GB; three digits of it."""
    return f"{count / 1e9:.{max(0, 2 - math.floor(math.log10(max(count, 1e7) / 1e9)))}f} GB"


def shown(mesh: MeshConfig) -> str:
    """mesh.fsdp=8 mesh.tensor=2: the axes that split something."""
    split = [f"mesh.{axis}={size}" for axis, size in sizes_of(mesh).items() if size > 1]
    return " ".join(split) or "no mesh"


def check_memory(config: RunConfig, mesh: Mesh, device_bytes: int) -> str | None:
    """A warning if a device of `mesh` with so many bytes may not hold a training step, else None.

    Called before anything is allocated, where `device_bytes` is known (`memory_limit`). The
    forecast was fitted to programs of a CPU and errs by up to `WITHIN` there, so it never stops a
    run unless `plan.refuse` is set: then a step that exceeds the memory by more raises `LrkvError`.
    The step is traced for it, which takes a second or two; a change that would fit is looked for
    among those that need no more devices, then among those that do.
    """
    sizes = {axis: mesh.shape[axis] for axis in AXES}
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update=sizes)})
    found = verdict(config, device_bytes)
    if found.fits:
        return None
    sentence = found.sentence(config.mesh)
    if config.plan.refuse and found.needs > (1 + WITHIN) * found.has:
        raise LrkvError(f"{sentence} (plan.refuse=false tries it)")
    return f"{sentence}; this is a forecast, which errs by up to {WITHIN:.0%} on CPUs: trying it"


def memory_limit(mesh: Mesh) -> int | None:
    """Bytes that JAX may take of this process's smallest device; None where it does not say."""
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    limits = [one["bytes_limit"] for one in stats if one.get("bytes_limit")]
    return min(limits, default=None)


def verdict(config: RunConfig, has: int) -> Verdict:
    """Whether the run's step fits in `has` bytes; `config.mesh` names every axis' size."""
    needs = memory(config).peak
    if needs <= has:
        return Verdict(needs, has)
    for change in changes(config):
        changed = _with(config, change)
        then = _needs(changed, has)
        if then is not None:
            return Verdict(needs, has, change, then.peak)
    return Verdict(needs, has)


def _needs(config: RunConfig | None, has: int) -> Memory | None:
    """What a run needs, if that is at most `has` and the run is possible at all."""
    if config is None:
        return None
    try:
        if sum(state_bytes(config).values()) > has:
            return None
        found = memory(config)
    except LrkvError:  # heads, width or rows that the changed mesh does not divide
        return None
    return found if found.peak <= has else None


def changes(config: RunConfig) -> Iterator[Change]:
    """Changes to try, the smallest first.

    One setting at a time: remat, accumulation, fsdp in place of data, more fsdp, tensor, moments.
    Then several: remat, accumulation and moments on the same devices, then on more.
    """
    mesh, train = config.mesh, config.train
    remat = {
        "none": ("minimal", "full"), "minimal": ("full",), "offload": ("full",), "full": (),
    }[train.remat]  # fmt: skip
    singles: list[Change] = [{"train.remat": policy} for policy in remat]
    rows = train.batch // (mesh.data * mesh.fsdp)  # of a device, over all microbatches
    fold = [a for a in range(train.accumulation + 1, rows + 1) if rows % a == 0]
    folds: list[Change] = [{"train.accumulation": a} for a in fold]
    singles += folds
    trades: list[Change] = [
        {"mesh.data": mesh.data // n, "mesh.fsdp": mesh.fsdp * n}
        for n in range(2, mesh.data + 1)
        if mesh.data % n == 0
    ]
    devices = math.prod(sizes_of(mesh).values())
    doublings = [2**n for n in range(1, 11) if devices * 2**n <= MOST_DEVICES]
    more = [
        {"mesh.fsdp": mesh.fsdp * n} | _fewer_microbatches(train, mesh.data * mesh.fsdp * n)
        for n in doublings
    ]
    split: list[Change] = [{"mesh.tensor": mesh.tensor * n} for n in doublings if n <= 8]
    moments: list[Change] = [{"optimizer.moments_dtype": "bfloat16"}]
    if config.optimizer.moments_dtype == "bfloat16":
        moments = []
    yield from [*singles, *trades, *more, *split, *moments]
    # Several settings, from what was largest of each.
    cheapest = [*({"train.remat": r} for r in remat[-1:]), *folds[-1:]]
    together: Change = {}
    for change in [*cheapest, *moments, *trades[-1:]]:
        together = together | change
        if len(together) > 1:
            yield together
    yield from (together | {"train.accumulation": train.accumulation} | c for c in [*more, *split])


def _fewer_microbatches(train: TrainConfig, shares: int) -> Change:
    """The accumulation under which each of so many devices still has a row, if it must change."""
    fits = [a for a in range(1, train.accumulation + 1) if train.batch % (a * shares) == 0]
    if not fits or fits[-1] == train.accumulation:
        return {}
    return {"train.accumulation": fits[-1]}


def _with(config: RunConfig, change: Change) -> RunConfig | None:
    """The run with these settings, or None where they contradict the rest."""
    for key, value in change.items():
        room, name = key.split(".")
        part = getattr(config, room).model_copy(update={name: value})
        config = config.model_copy(update={room: part})
    rows = config.train.batch // config.train.accumulation
    whole = config.train.batch % config.train.accumulation == 0
    return config if whole and rows % (config.mesh.data * config.mesh.fsdp) == 0 else None
