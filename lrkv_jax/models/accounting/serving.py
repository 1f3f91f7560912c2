"""The costs of decoding: the cache at a length, the sequences that fit, the floor of a step.

A step of decoding reads every weight but the embedding's table once, and of every sequence's cache
what its windows see; no step is shorter than those bytes over the device's bandwidth.
"""

from dataclasses import dataclass

from lrkv_jax.config import ModelConfig
from lrkv_jax.distributed.hardware import Hardware
from lrkv_jax.models.accounting.counts import (
    CACHE_ITEMSIZE,
    cache_allocated_bytes,
    layer_allocated_bytes,
    over_layers,
    parameter_counts,
)

USABLE = 0.9  # of the memory; the rest is for activations, the kernels and the driver
PAGE = 64  # tokens of a page, as in `lrkv_jax.inference.pages`, which needs JAX
PREFILL_CHUNK = 512  # tokens of prompts that an engine on an accelerator reads at once


@dataclass(frozen=True)
class Serving:
    """Decoding on one device, every sequence `length` tokens long. Bytes and seconds.

    `largest_batch` is 0 where one sequence does not fit. `floor` is a step's at that batch, or at
    one sequence; `floor_of_one` is that of a single sequence. `flops_per_byte` are attention's, of
    each byte that it reads: beyond the device's ratio, arithmetic takes longer than bytes.
    """

    length: int
    weights: int
    cache_per_sequence: int
    largest_batch: int
    floor_of_one: float
    floor: float
    flops_per_byte: float

    @property
    def tokens_per_second(self) -> float:
        """At most, with the largest batch."""
        return self.largest_batch / self.floor


@dataclass(frozen=True)
class AttentionFlops:
    """FLOPs of one new token's attention in all layers: `fixed`, and more for each cached token.

    The projections of the new token itself are not in it: they cost twice their parameters.
    `in_windows` are those for each token of the layers' windows, with the window.
    """

    fixed: int
    in_windows: tuple[tuple[int | None, int], ...]

    @property
    def per_cached_token(self) -> int:
        """Those of a token that all layers see."""
        return sum(flops for _, flops in self.in_windows)

    def at(self, length: int) -> int:
        """The sum with `length` tokens in the cache."""
        seen = (flops * min(length, window or length) for window, flops in self.in_windows)
        return self.fixed + sum(seen)


def attention_flops(model: ModelConfig) -> AttentionFlops:
    """FLOPs of attention to the cache in a decoding step of one sequence."""
    fixed = over_layers(model, lambda kind: kind.attention.decode_flops(kind))
    each = tuple(
        (kind.window, model.cycles * kind.attention.decode_flops_per_cached_token(kind))
        for kind in model.cycle
    )
    return AttentionFlops(fixed, each)


def reserved_pages(length: int, window: int | None, ahead: int) -> int:
    """Pages that a layer reserves for a sequence of up to `length` tokens.

    Of those a layer with a window keeps what that has, and the `ahead` tokens that calls may write.
    """
    pages = -(-length // PAGE)
    return pages if window is None else min(pages, (window + ahead) // PAGE + 2)


def serving(
    model: ModelConfig, device: Hardware, length: int, *, prefill_chunk: int = PREFILL_CHUNK
) -> Serving:
    """Decoding in bfloat16 on one device; the cache is counted as an `Engine` allocates it.

    Its `prefill_chunk` is whole pages, and longer than two calls' steps.
    """
    counts = parameter_counts(model)
    weights = counts.total * CACHE_ITEMSIZE
    looked_up = 0 if model.tied_head else counts.embedding * CACHE_ITEMSIZE
    read, flops = cache_allocated_bytes(model, length), attention_flops(model)
    flops_per_byte = (flops.at(length) - flops.fixed) / read

    def reserved(kind: ModelConfig) -> int:
        pages = reserved_pages(length, kind.window, prefill_chunk)
        return pages * PAGE * layer_allocated_bytes(kind)

    cache = over_layers(model, reserved)
    batch = max(0, int((USABLE * device.memory - weights) // cache))

    def floor(sequences: int) -> float:
        return (weights - looked_up + sequences * read) / device.memory_bandwidth

    return Serving(length, weights, cache, batch, floor(1), floor(max(1, batch)), flops_per_byte)
