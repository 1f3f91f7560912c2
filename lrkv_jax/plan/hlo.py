"""What an optimised HLO module does: every instruction, with how often a run executes it.

An instruction in the body of a loop of n turns runs n times. Bytes are what one device sends, as in
`lrkv_jax.foresight.messages`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lrkv_jax.foresight.messages import bytes_sent

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ITEMSIZES = {
    "pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4,
    "u32": 4, "f64": 8, "s64": 8, "u64": 8,
}  # fmt: skip
_HEAD = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([a-z-]+)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)")
_OPERAND = re.compile(r"(?:\w+\[[\d,]*\]\S* )?%?([\w.-]+)")
# replica_groups={{0,1},{2,3}}, [2,4]<=[8], or mesh['data'=2,'fsdp'=4] {'fsdp'}
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    """One instruction: `shapes` and `dtypes` are its results', `times` how often a run executes it.

    `started` says that it is the first half of an asynchronous one.
    """

    name: str
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    rest: str
    computation: str
    times: int
    started: bool

    @property
    def scope(self) -> str:
        """Where in the program it comes from, by JAX's name stack."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found.group(1) if found else ""

    @property
    def bytes(self) -> list[int]:
        """Bytes of each result."""
        pairs = zip(self.dtypes, self.shapes, strict=True)
        return [ITEMSIZES.get(dtype, 4) * math.prod(shape) for dtype, shape in pairs]


def instructions(text: str) -> list[Instruction]:
    """Every instruction that a run reaches."""
    lines, here = [], ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            here = "ENTRY" if line.startswith("ENTRY") else head.group(1)
        elif here and (found := _INSTRUCTION.match(line)):
            lines.append((here, *found.groups()))
    times = _times(lines)
    out = []
    for where, name, result, kind, rest in lines:
        if not times[where]:
            continue
        results = _SHAPE.findall(result)
        shapes = tuple(tuple(int(n) for n in dims.split(",") if n) for _, dims in results)
        dtypes = tuple(dtype for dtype, _ in results)
        plain, started = kind.removesuffix("-start"), kind.endswith("-start")
        out.append(Instruction(name, plain, shapes, dtypes, rest, where, times[where], started))
    return out


def collectives(text: str) -> list[Instruction]:
    """The collectives among them."""
    return [i for i in instructions(text) if i.kind in COLLECTIVES]


def sent(text: str, devices: int) -> list[dict[str, Any]]:
    """The collectives of a module over `devices` devices, as `by_kind` has them."""
    found = []
    for i in collectives(text):
        group, sizes = _group_size(i.rest, devices), i.bytes
        if i.started and i.kind in ("all-gather", "collective-permute"):
            sizes = sizes[len(sizes) // 2 :]  # operands, then results
        operand = sum(sizes)
        if i.kind == "all-gather":
            operand //= group
        elif i.kind == "reduce-scatter":
            operand *= group
        each = round(bytes_sent(i.kind, operand, group))
        found.append((i.kind, group, i.times, i.times * each))
    return by_kind(found)


def by_kind(found: Iterable[tuple[str, int, int, int]]) -> list[dict[str, Any]]:
    """(kind, devices of a group, count, bytes) summed over kind and group, most bytes first."""
    counts: Counter[tuple[str, int]] = Counter()
    total: Counter[tuple[str, int]] = Counter()
    for kind, group, count, size in found:
        counts[kind, group] += count
        total[kind, group] += size
    return [
        {"kind": kind, "devices": group, "count": counts[kind, group], "bytes": size}
        for (kind, group), size in total.most_common()
    ]


def product_flops(text: str) -> int:
    """2 · multiplications of all matrix products that one device executes in a step."""
    found, total = instructions(text), 0
    shapes = {(i.computation, i.name): i.shapes[0] for i in found if i.shapes}
    for i in found:
        if i.kind != "dot":
            continue
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest).group(1)
        left = shapes[i.computation, _OPERAND.match(i.rest).group(1)]
        contracted = math.prod(left[int(d)] for d in dims.split(",") if d)
        total += i.times * 2 * math.prod(i.shapes[0]) * contracted
    return total


def _times(lines) -> Counter[str]:
    """How often each computation runs."""
    calls: dict[str, list[tuple[str, int]]] = {}
    for where, _, _, kind, rest in lines:
        turns = _TURNS.search(rest)
        count = int(turns.group(1)) if kind == "while" and turns else 1
        calls.setdefault(where, []).extend((name, count) for name in _CALLED.findall(rest))
    times: Counter[str] = Counter()

    def visit(computation, count):
        times[computation] += count
        for name, turns in calls.get(computation, ()):
            visit(name, count * turns)

    visit("ENTRY", 1)
    return times


def _group_size(rest: str, devices: int) -> int:
    if named := _NAMED.search(rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named.group(2)))
    if counted := _COUNTED.search(rest):
        return int(counted.group(1))
    if listed := _LISTED.search(rest):
        return len(listed.group(1).split(","))
    return devices
