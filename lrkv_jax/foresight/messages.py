"""The collectives that a traced program names: kind, mesh axes, how often, and bytes sent.

Bytes are those that one device sends in one step with the bandwidth-optimal algorithms: of n
devices, an all-gather sends each shard to n − 1 others, a reduce-scatter and an all-to-all send
(n − 1)/n of what goes in, and an all-reduce is a reduce-scatter and an all-gather.
"""

import math
from collections.abc import Mapping
from typing import Any

from lrkv_jax.accounting.timing import Message
from lrkv_jax.foresight.program import Program

KINDS = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def bytes_sent(kind: str, operand_bytes: int, devices: int) -> float:
    """Bytes that each of n devices sends for one collective of this operand."""
    if devices == 1:
        return 0
    return {
        "all-gather": operand_bytes * (devices - 1),
        "reduce-scatter": operand_bytes * (devices - 1) / devices,
        "all-to-all": operand_bytes * (devices - 1) / devices,
        "all-reduce": 2 * operand_bytes * (devices - 1) / devices,
        "collective-permute": operand_bytes,
    }[kind]


def messages_of(program: Program, sizes: Mapping[str, int]) -> list[Message]:
    """The collectives of a step over a mesh of these sizes; loops count every turn.

    Those over axes of size 1 are none.
    """
    found: dict[tuple[str, tuple[str, ...], str], list[Any]] = {}
    _visit(program, sizes, 1, found)
    return sorted(
        (Message(*key, count, round(sent)) for key, (count, sent) in found.items()),
        key=lambda message: -message.bytes,
    )


def _visit(program, sizes, times, found) -> None:
    for operation in program.operations:
        axes = tuple(axis for axis in operation.axes if sizes.get(axis, 1) > 1)
        if operation.name in KINDS and axes:
            kind = KINDS[operation.name]
            devices = math.prod(sizes[axis] for axis in axes)
            size = sum(operand.bytes for operand in operation.operands)
            total = found.setdefault((kind, axes, operation.part), [0, 0.0])
            total[0] += times
            total[1] += times * bytes_sent(kind, size, devices)
        for body in operation.bodies:
            _visit(body, sizes, times * operation.turns, found)
