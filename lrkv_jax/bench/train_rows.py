"""What the training benchmark writes down: one row a line of a scale."""

from __future__ import annotations

from dataclasses import dataclass

from lrkv_jax.bench.lines import Line, name_of
from lrkv_jax.bench.report import MEASURED, fastest_mha


@dataclass
class Row:
    """One variant's training step at one scale and mesh. Bytes are of one device.

    `forward_ms`, `backward_ms` and `optimizer_ms` add up to `ms`: the loss alone, the gradient
    without it, the step without the gradient.
    """

    scale: str
    variant: str
    rope: str | None  # LRKV's mode
    layers: int  # that the time is of
    scale_layers: int
    vocabulary: int
    batch: int  # sequences a step
    context: int
    accumulation: int
    remat: str
    dtype: str
    mesh: dict[str, int]
    parameters: int
    flops_per_step: int  # the written formula's
    status: str = MEASURED
    reason: str | None = None  # why it was not measured
    loss: float | None = None  # of the first step, nats a token
    compile_seconds: float | None = None  # of the step, tracing included
    compile_cached: bool | None = None
    state_bytes: int | None = None  # parameters, moments and a batch
    peak_bytes: int | None = None
    peak_from: str | None = None  # device: its allocator's; xla: the compiler's analysis
    samples: int = 0
    ms: float | None = None  # median milliseconds of a step
    ms_first_quartile: float | None = None
    ms_third_quartile: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    data_ms: float | None = None  # reading a batch and putting it on the devices
    host_ms: float | None = None  # from the call to its return, within ms
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    ceiling_flops_per_second: float | None = None  # of products, all devices together
    mfu_of_ceiling: float | None = None
    mfu_of_datasheet: float | None = None
    time_over_mha: float | None = None  # MHA of the same run and shape
    flops_over_mha: float | None = None

    @classmethod
    def of(cls, scale: str, scale_layers: int, line: Line, mesh: dict[str, int], **counts) -> Row:
        """The row of a line before anything is measured."""
        model, train = line.config.model, line.config.train
        return cls(
            scale, line.variant, line.rope, model.layers, scale_layers, model.vocabulary,
            train.batch, train.context, train.accumulation, train.remat, model.dtype, mesh,
            **counts,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """mha, lrkv full."""
        return name_of(self.variant, self.rope)

    @property
    def shape(self) -> tuple:
        """What rows must share to be compared."""
        return (
            self.scale, self.layers, self.vocabulary, self.batch, self.context, self.accumulation,
            self.remat, self.dtype, *self.mesh.items(),
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.context


def compare_with_mha(rows: list[Row]) -> None:
    """Fill in each measured row's time and FLOPs over those of MHA at its shape."""
    best = fastest_mha(rows, lambda row: row.ms)
    for row in rows:
        if row.status == MEASURED and row.shape in best:
            row.time_over_mha = row.ms / best[row.shape].ms
            row.flops_over_mha = row.flops_per_step / best[row.shape].flops_per_step
