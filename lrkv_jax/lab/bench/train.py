"""The training benchmark: scales × variants on one mesh, in one run.

At each scale every variant is compiled, started, and then timed together, one step of each in turn
with a large product, so that a busy moment of the machine affects them all. A time over MHA's is
of the same run and shape, an MFU over products of the same run and devices.

B sequences  U tokens of a sequence, one more than the context
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lrkv_jax.config import RunConfig, load_config
from lrkv_jax.distributed.compilation import Compiled, compile_ahead, program_bytes
from lrkv_jax.distributed.hardware import hardware_of
from lrkv_jax.distributed.mesh import check_mesh, make_mesh
from lrkv_jax.distributed.rules import batch_sharding
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench import clock, report
from lrkv_jax.lab.report.tabulated import tabulated
from lrkv_jax.models.accounting.counts import parameter_counts, training_flops_per_token
from lrkv_jax.training.state import abstract_state, init_state, resolve
from lrkv_jax.training.step import make_train_step
from lrkv_jax.training.token_batch import BatchFormat

# A share of a step, so that the first step's loss may differ from ln V by rounding alone.
LOSS_TOLERANCE = 1e-2


@dataclass(frozen=True)
class TrainBenchmark:
    """Settings of the benchmark. `overrides` change every variant's settings, as mesh.fsdp=2 does.

    Raises `LrkvError` for what does not exist.
    """

    scales: tuple[str, ...] = ("128m",)
    variants: tuple[str, ...] | None = None  # None: all of the scale
    overrides: tuple[str, ...] = ()
    depth: int | None = None  # layers; None is the scale's
    samples: int = 15
    seconds: float = 60.0  # that one variant may take before it stops at five samples
    seed: int = 0

    def __post_init__(self):
        report.check_settings(self, "scales", "variants")
        if self.depth is not None and self.depth < 1:
            raise LrkvError("depth: use 1 or more layers")


@dataclass
class TrainTiming:
    """One variant's training step at one scale and mesh. Bytes are of one device."""

    scale: str
    variant: str
    layers: int  # that the time is of
    scale_layers: int
    vocabulary: int
    global_batch_size: int  # sequences per step
    seq_len: int
    grad_accum_steps: int
    remat: str
    dtype: str
    mesh: dict[str, int]
    parameters: int
    flops_per_step: int  # the written formula's
    status: str = report.MEASURED
    reason: str | None = None  # why it was not measured
    loss: float | None = None  # of the first step, nats per token
    compile_seconds: float | None = None  # of the step, tracing included
    state_bytes: int | None = None  # parameters, moments and a batch
    peak_bytes: int | None = None  # of a step, by XLA's analysis
    samples: int = 0
    ms: float | None = None  # median milliseconds of a step
    ms_first_quartile: float | None = None
    ms_third_quartile: float | None = None
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    ceiling_flops_per_second: float | None = None  # of products, all devices together
    mfu_of_ceiling: float | None = None
    mfu_of_datasheet: float | None = None
    time_over_mha: float | None = None  # MHA of the same run and shape
    flops_over_mha: float | None = None

    @property
    def name(self) -> str:
        """128m mha."""
        return f"{self.scale} {self.variant}"

    @property
    def shape(self) -> tuple:
        """The key that rows must share to be compared."""
        return (
            self.scale, self.layers, self.vocabulary, self.global_batch_size, self.seq_len,
            self.grad_accum_steps, self.remat, self.dtype, *self.mesh.items(),
        )  # fmt: skip


def compile_step(config: RunConfig, mesh: Mesh) -> Compiled:
    """The configuration's step, compiled from shapes alone; nothing is allocated."""
    train = config.train
    # Every id is a byte: the number of bytes of a token costs no time.
    token_bytes_V = np.ones(config.model.vocabulary, np.int32)
    batch_format = BatchFormat.of(config, bos=0)  # which token it is changes no shape
    step = make_train_step(config, mesh, token_bytes_V, batch_format)
    tokens_BU = jax.ShapeDtypeStruct(
        (train.global_batch_size, train.seq_len + 1), jnp.int32, sharding=batch_sharding(mesh)
    )
    return compile_ahead(step, abstract_state(config, mesh), tokens_BU, mesh=mesh)


def start(config: RunConfig, mesh: Mesh, step: Compiled, seed: int) -> tuple[float, clock.Timer]:
    """Make the state and a random batch; returns the first step's loss, and a timer of others."""
    with jax.set_mesh(mesh):
        state = init_state(config, mesh)
    # Random ids: what they are costs no time.
    shape = (config.train.global_batch_size, config.train.seq_len + 1)
    ids_BU = np.random.default_rng(seed).integers(0, config.model.vocabulary, shape, np.int32)
    tokens_BU = jax.device_put(ids_BU, batch_sharding(mesh))
    state, metrics = jax.block_until_ready(step.call(state, tokens_BU))

    def timer() -> float:
        nonlocal state
        began = time.perf_counter()
        state, _ = jax.block_until_ready(step.call(state, tokens_BU))
        return time.perf_counter() - began

    return float(metrics["loss"]), timer


def here(**chosen: Any) -> TrainBenchmark:
    """The settings for this machine, which chooses those that are None in `chosen`.

    On a CPU about two minutes of the quickstart model on two cores, on a GPU the 128M model.
    """
    small: dict[str, Any] = {"scales": ("quickstart",), "samples": 7}
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
    scales = {
        scale: {
            name: resolve(config)
            for name, config in report.variants_of(
                scale, settings.variants, depth=settings.depth, overrides=settings.overrides
            ).items()
        }
        for scale in settings.scales
    }
    meshes = {}
    for scale, variants in scales.items():
        first, *_ = variants.values()
        meshes[scale] = make_mesh(first.mesh, devices)
        for config in variants.values():
            check_mesh(config, meshes[scale])
    rows: list[TrainTiming] = []
    for scale, variants in scales.items():
        rows += _at_one_scale(settings, scale, variants, meshes[scale], progress)
    report.compare_with_mha(rows, time_over_mha="ms", flops_over_mha="flops_per_step")
    return {
        "benchmark": "train",
        **report.machine(),
        "devices": len(devices),
        "settings": asdict(settings) | {"dtype": ", ".join(sorted({r.dtype for r in rows}))},
        "rows": rows,
    }


def _at_one_scale(
    settings: TrainBenchmark, scale: str, variants: dict[str, RunConfig], mesh: Mesh, progress
) -> list[TrainTiming]:
    """Every row of one scale."""
    scale_layers = load_config(scale).model.layers
    rows: list[TrainTiming] = []
    compiled: list[tuple[TrainTiming, RunConfig, Compiled]] = []
    for done, (variant, config) in enumerate(variants.items()):
        progress(f"{scale}, {variant}: compiling", done, len(variants))
        row = _row(scale, variant, config, scale_layers, mesh)
        rows.append(row)
        try:
            step = compile_step(config, mesh)
        except Exception as error:  # one variant may not compile, and the rest must go on
            report.put_down(row, error)
            continue
        row.compile_seconds = step.seconds
        row.state_bytes = step.call.memory_analysis().argument_size_in_bytes
        row.peak_bytes = program_bytes(step.call)
        compiled.append((row, config, step))
    ready = [row for row, *_ in compiled]
    # Every state stays while one of them steps.
    need = sum(row.state_bytes for row in ready)
    need += max((row.peak_bytes - row.state_bytes for row in ready), default=0)
    if jax.default_backend() == "cpu":
        need *= len(mesh.local_devices)  # simulated devices share the machine's memory
    if report.skip_unless_it_fits(ready, need, clock.memory_limit()):
        progress(f"{scale}: timing")
        _time(settings, mesh, _started(compiled, mesh, settings.seed))
    return rows


def _row(scale: str, variant: str, config: RunConfig, scale_layers: int, mesh: Mesh) -> TrainTiming:
    model, train = config.model, config.train
    tokens = train.global_batch_size * train.seq_len
    return TrainTiming(
        scale, variant, model.layers, scale_layers, model.vocabulary,
        train.global_batch_size, train.seq_len, train.grad_accum_steps, train.remat,
        model.dtype, dict(mesh.shape), parameter_counts(model).total,
        tokens * training_flops_per_token(model, train.seq_len),
    )  # fmt: skip


def _started(
    compiled: Sequence[tuple[TrainTiming, RunConfig, Compiled]], mesh: Mesh, seed: int
) -> list[tuple[TrainTiming, clock.Timer]]:
    """Start each variant, and return the timers of those whose first loss is right."""
    started = []
    for row, config, step in compiled:
        try:
            row.loss, timer = start(config, mesh, step, seed)
        except Exception as error:
            report.put_down(row, error)
            continue
        expected = math.log(row.vocabulary)
        # A head of zeros gives every token the same probability.
        if not config.model.tied_head and abs(row.loss / expected - 1) > LOSS_TOLERANCE:
            row.status = report.WRONG
            row.reason = f"the first loss is {row.loss:.3f}, not ln V = {expected:.3f}: not timed"
            continue
        started.append((row, timer))
    return started


def _time(
    settings: TrainBenchmark, mesh: Mesh, started: list[tuple[TrainTiming, clock.Timer]]
) -> None:
    """Fill in the rows' times, sampled alternately."""
    if not started:
        return
    products, product_flops = clock.matmul_timer(mesh, started[0][0].dtype)
    timers = [products, *(timer for _, timer in started)]
    product, *taken = clock.interleaved(timers, settings.samples, seconds=settings.seconds)
    limit = product_flops / clock.quartiles(product)[1]
    device = hardware_of(mesh.devices.flat[0].device_kind)
    for (row, _), samples in zip(started, taken, strict=True):
        quartiles = clock.quartiles(samples)
        row.samples = len(samples)
        row.ms_first_quartile, row.ms, row.ms_third_quartile = (1e3 * t for t in quartiles)
        row.tokens_per_second = row.global_batch_size * row.seq_len / quartiles[1]
        row.flops_per_second = row.flops_per_step / quartiles[1]
        row.ceiling_flops_per_second = limit
        row.mfu_of_ceiling = row.flops_per_second / limit
        if device is not None and row.dtype == "bfloat16":  # the only peak in the table
            row.mfu_of_datasheet = row.flops_per_second / (device.bf16_flops * mesh.size)


COLUMNS = (
    "variant", "ms", "tokens\n/s", "MFU", "MFU,\nsheet", "time\n× MHA", "FLOPs\n× MHA", "peak\nMB",
)  # fmt: skip
LEGEND = (
    "Medians of fenced steps, ± half the distance between the quartiles. MFU: model FLOPs per\n"
    "second over those of large products of the same run; sheet: over the vendor's peak, where\n"
    "there is one. MB of one device."
)


def tables(found: dict[str, Any]) -> str:
    """A table for each shape of what was measured, and every reason why something was not."""
    rows = found["rows"]
    parts = [f"{report.where(found)}, {found['devices']} device(s), `{found['command']}`"]
    measured = [row for row in rows if row.status == report.MEASURED]
    for _, group in groupby(measured, key=lambda row: row.shape):
        same = list(group)
        parts += [_title(same[0]), tabulated(COLUMNS, list(map(_cells, same)), form="simple")]
    return "\n\n".join([*parts, *report.reasons(rows), LEGEND])


def _title(row: TrainTiming) -> str:
    cut = "" if row.layers == row.scale_layers else f" of {row.scale_layers}"
    mesh = " x ".join(f"{axis} {size}" for axis, size in row.mesh.items() if size > 1)
    parts = [
        f"{row.scale}: {row.layers}{cut} layers", f"vocabulary {row.vocabulary:,}",
        f"{row.global_batch_size} x {row.seq_len:,} tokens per step",
        f"in {row.grad_accum_steps} parts" if row.grad_accum_steps > 1 else "",
        f"remat {row.remat}" if row.remat != "none" else "", row.dtype, mesh,
    ]  # fmt: skip
    return ", ".join(filter(None, parts))


def _cells(row: TrainTiming) -> list[str]:
    sheet = row.mfu_of_datasheet
    return [
        row.variant,
        report.median(row.ms, row.ms_first_quartile, row.ms_third_quartile),
        f"{row.tokens_per_second:,.0f}",
        f"{row.mfu_of_ceiling:.1%}",
        "" if sheet is None else f"{sheet:.1%}",
        report.ratio(row.time_over_mha),
        report.ratio(row.flops_over_mha),
        report.number(row.peak_bytes / 1e6),
    ]
