"""The collectives and matrix products of a compiled program, read from its optimized HLO text.

XLA's `cost_analysis` counts the body of a loop once, however often it runs. Here an instruction in
the body of a loop of n turns runs n times.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_HEAD = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([a-z-]+)\((.*)$")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)")
_OPERAND = re.compile(r"(?:\w+\[[\d,]*\]\S* )?%?([\w.-]+)")


@dataclass(frozen=True)
class Instruction:
    """One instruction: `shapes` are its results', `times` how often a run executes it.

    `rest` is the line after the opening parenthesis: operands, attributes and metadata.
    """

    name: str
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    rest: str
    computation: str
    times: int

    @property
    def scope(self) -> str:
        """Where in the program it comes from, by JAX's name stack."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found.group(1) if found else ""


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
        found = _SHAPE.findall(result)
        shapes = tuple(tuple(int(n) for n in dims.split(",") if n) for dims in found)
        out.append(Instruction(name, kind, shapes, rest, where, times[where]))
    return out


def collectives(text: str) -> list[Instruction]:
    """The collectives among them."""
    return [i for i in instructions(text) if i.kind in COLLECTIVES]


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
