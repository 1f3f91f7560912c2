"""The training benchmark: scales × variants on one mesh, in one run.

At each scale every line is compiled, started, and then timed together, one step of each in turn
with a large product, so that a busy moment of the machine meets them all. A time over MHA's is
of the same run and shape, an MFU over products of the same run and devices.

B sequences  T positions
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from lrkv_jax.config import RunConfig
from lrkv_jax.distributed.compilation import Compiled, compile_ahead, program_bytes
from lrkv_jax.distributed.hardware import hardware_of
from lrkv_jax.distributed.mesh import check_mesh, make_mesh
from lrkv_jax.distributed.rules import batch_sharding
from lrkv_jax.lab.bench import clock, report
from lrkv_jax.lab.bench.train_table import TrainTiming
from lrkv_jax.lab.bench.variants import ScaleVariant, variants_of
from lrkv_jax.models.accounting.counts import (
    parameter_counts,
    training_flops_per_token,
)
from lrkv_jax.training.state import abstract_state, init_state, resolve
from lrkv_jax.training.step import make_train_step

# A share of a step, so that the first step's loss may differ from ln V by rounding alone.
LOSS_TOLERANCE = 1e-2


@dataclass(frozen=True)
class TrainBenchmark:
    """What to measure. `overrides` change every line's settings, as mesh.fsdp=2 does.

    Raises `LrkvError` for what does not exist.
    """

    scales: tuple[str, ...] = ("128m",)
    variants: tuple[str, ...] | None = None  # None: all of the scale
    ropes: tuple[str, ...] | None = None  # None: all that a variant has
    overrides: tuple[str, ...] = ()
    depth: int | None = None  # layers; None is the scale's
    samples: int = 15
    seconds: float = 60.0  # that one line may take before it stops at five samples
    seed: int = 0

    def __post_init__(self):
        report.check(self, "scales", "variants", "ropes")


class TrainProgram:
    """One configuration's step, compiled from shapes alone; nothing is allocated."""

    def __init__(self, config: RunConfig, mesh: Mesh):
        self.config, self.mesh = config, mesh
        train = config.train
        # Every id stands for a byte: what a token is worth in bytes costs no time.
        token_bytes_V = np.ones(config.model.vocabulary, np.int32)
        step = make_train_step(config, mesh, token_bytes_V)
        tokens_BU = jax.ShapeDtypeStruct(
            (train.global_batch_size, train.seq_len + 1), jnp.int32, sharding=batch_sharding(mesh)
        )
        state = abstract_state(config, mesh)
        self.step: Compiled = compile_ahead(step, state, tokens_BU, mesh=mesh)

    @property
    def state_bytes(self) -> int:
        """Bytes that one device holds between steps: parameters, moments, and a batch."""
        return self.step.call.memory_analysis().argument_size_in_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes that one device holds in a step, by XLA's analysis."""
        return program_bytes(self.step.call)


class Trainer:
    """A configuration in training: its state, a random batch, and a timer of its step."""

    def __init__(self, program: TrainProgram, seed: int):
        self.program = program
        config, mesh = program.config, program.mesh
        with jax.set_mesh(mesh):
            self._state = init_state(config, mesh)
        self.tokens_BU = random_tokens(config, mesh, seed)
        self._state, metrics = program.step.call(self._state, self.tokens_BU)
        self.first_loss = float(jax.block_until_ready(metrics)["loss"])

    def timer(self) -> float:
        """Seconds from the call of a step until the new state is there."""
        began = time.perf_counter()
        self._state, metrics = self.program.step.call(self._state, self.tokens_BU)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - began


def random_tokens(config: RunConfig, mesh: Mesh, seed: int) -> Int[Array, "B U"]:
    """A batch of uniformly random ids, U = T + 1: what they are costs no time."""
    shape = (config.train.global_batch_size, config.train.seq_len + 1)
    ids_BU = np.random.default_rng(seed).integers(0, config.model.vocabulary, shape, np.int32)
    return jax.device_put(ids_BU, batch_sharding(mesh))


def here(**chosen: Any) -> TrainBenchmark:
    """What to measure on this machine; of `chosen`, what is None is left to it.

    On a CPU about two minutes of the quickstart model on two cores, on a GPU the 128M model.
    """
    small: dict[str, Any] = {"scales": ("quickstart",), "ropes": ("full", "latent"), "samples": 7}
    defaults = small if jax.default_backend() == "cpu" else {}
    return TrainBenchmark(
        **defaults | {k: value for k, value in chosen.items() if value is not None}
    )


def run(
    settings: TrainBenchmark,
    progress: report.Progress = report.silent,
    *,
    devices: list[jax.Device] | None = None,
) -> dict[str, Any]:
    """Measure, and return the report: machine, settings and rows.

    The mesh is made of `devices`, all unless given. Raises `LrkvError`, before anything is
    compiled, for a configuration or a mesh that cannot be.
    """
    devices = jax.devices() if devices is None else devices
    found = report.machine()
    scales = {scale: _lines(scale, settings) for scale in settings.scales}
    meshes = {scale: make_mesh(lines[0].config.mesh, devices) for scale, lines in scales.items()}
    for scale, lines in scales.items():
        for line in lines:
            check_mesh(line.config, meshes[scale])
    rows: list[TrainTiming] = []
    total = sum(map(len, scales.values()))
    for scale, lines in scales.items():
        rows += _at_one_scale(settings, scale, lines, meshes[scale], progress, len(rows), total)
    report.compare_with_mha(rows, time_over_mha="ms", flops_over_mha="flops_per_step")
    progress("done", total, total)
    return {
        "benchmark": "train",
        **found,
        "devices": len(devices),
        "settings": asdict(settings) | {"dtype": ", ".join(sorted({r.dtype for r in rows}))},
        "ceiling": {"side": clock.side(), "samples": settings.samples},
        "rows": rows,
    }


def _lines(scale: str, settings: TrainBenchmark) -> list[ScaleVariant]:
    lines = variants_of(
        scale, settings.variants, settings.ropes, depth=settings.depth, overrides=settings.overrides
    )
    return [line._replace(config=resolve(line.config)) for line in lines]


def _at_one_scale(settings, scale, lines, mesh, progress, done, total) -> list[TrainTiming]:
    """Every row of one scale."""
    scale_layers = variants_of(scale, settings.variants, None)[0].config.model.layers
    rows: list[TrainTiming] = []
    programs: list[tuple[TrainTiming, TrainProgram]] = []
    for line in lines:
        progress(f"{scale}, {line.name}: compiling", done + len(rows), total)
        model, train = line.config.model, line.config.train
        per_token = training_flops_per_token(model, train.seq_len)
        row = TrainTiming(
            scale, line.variant, line.rope, model.layers, scale_layers, model.vocabulary,
            train.global_batch_size, train.seq_len, train.grad_accum_steps, train.remat,
            model.dtype, dict(mesh.shape), parameter_counts(model).total, per_token *
            train.global_batch_size * train.seq_len,
        )  # fmt: skip
        rows.append(row)
        try:
            made = TrainProgram(line.config, mesh)
        except Exception as error:  # one line may not compile, and the rest must go on
            row.status, row.reason = report.reason_of(error)
            continue
        row.compile_seconds, row.compile_cached = made.step.seconds, made.step.cached
        row.state_bytes, row.peak_bytes = made.state_bytes, made.peak_bytes
        programs.append((row, made))
    if not programs or _do_not_fit(programs, mesh):
        return rows
    progress(f"{scale}: timing", done + len(rows), total)
    _time(settings, mesh, _start(programs, settings.seed))
    return rows


def _do_not_fit(programs: Sequence[tuple[TrainTiming, TrainProgram]], mesh: Mesh) -> bool:
    """Whether the lines' states and one step's arrays exceed the memory; the rows then say so."""
    need = sum(made.state_bytes for _, made in programs)
    need += max(made.peak_bytes - made.state_bytes for _, made in programs)
    if jax.default_backend() == "cpu":
        need *= len(mesh.local_devices)  # simulated devices share the machine's memory
    limit = clock.memory_limit()
    if need <= limit:
        return False
    for row, _ in programs:
        row.status = report.SKIPPED
        row.reason = (
            f"{need / 1e9:.1f} GB needed at once, {limit / 1e9:.1f} GB to be had: fewer variants, "
            "a smaller train.global_batch_size or fewer layers (--depth) would fit"
        )
    return True


def _start(
    programs: Sequence[tuple[TrainTiming, TrainProgram]], seed: int
) -> list[tuple[TrainTiming, Trainer]]:
    """Make each line's state and take its first step; those that fail say why."""
    started = []
    for row, made in programs:
        try:
            trainer = Trainer(made, seed)
        except Exception as error:
            row.status, row.reason = report.reason_of(error)
            continue
        row.loss, expected = trainer.first_loss, math.log(row.vocabulary)
        # A head of zeros gives every token the same probability.
        if not made.config.model.tied_head and abs(row.loss / expected - 1) > LOSS_TOLERANCE:
            row.status = report.WRONG
            row.reason = f"the first loss is {row.loss:.3f}, not ln V = {expected:.3f}: not timed"
            continue
        started.append((row, trainer))
    return started


def _time(settings: TrainBenchmark, mesh: Mesh, started: list[tuple[TrainTiming, Trainer]]) -> None:
    """Fill in the rows' times, sampled in turn."""
    if not started:
        return
    products, product_flops = clock.matmul_timer(mesh, started[0][0].dtype)
    timers = [trainer.timer for _, trainer in started]
    product, *taken = clock.interleaved(
        [products, *timers], settings.samples, seconds=settings.seconds
    )
    limit = product_flops / clock.quartiles(product)[1]
    device = hardware_of(mesh.devices.flat[0].device_kind)
    for (row, _), samples in zip(started, taken, strict=True):
        quartiles = clock.quartiles(samples)
        row.samples = len(samples)
        row.ms_first_quartile, row.ms, row.ms_third_quartile = (1e3 * t for t in quartiles)
        row.tokens_per_second = row.tokens / quartiles[1]
        row.flops_per_second = row.flops_per_step / quartiles[1]
        row.ceiling_flops_per_second = limit
        row.mfu_of_ceiling = row.flops_per_second / limit
        if device is not None and row.dtype == "bfloat16":  # the only peak in the table
            row.mfu_of_datasheet = row.flops_per_second / (device.bf16_flops * mesh.size)
