"""What a compiled program does, read from its optimised HLO: collectives and matrix products.

Loops count: an instruction in the body of a loop of n turns is executed n times.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_HEAD = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?(\S+) = (\(.*?\)|\S+) ([a-z-]+)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Instruction:
    """One instruction: `shapes` are its results', `times` how often a run executes it."""

    name: str
    kind: str
    shapes: tuple[tuple[int, ...], ...]
    rest: str
    computation: str
    times: int

    @property
    def scope(self) -> str:
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found.group(1) if found else ""


def instructions(text: str) -> list[Instruction]:
    """Every instruction that a run reaches, with the times it does."""
    parsed, entry, here = {}, None, None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            here = head.group(1)
            parsed[here] = []
            entry = here if line.startswith("ENTRY") else entry
        elif here and (found := _INSTRUCTION.match(line)):
            parsed[here].append(found.groups())
    times = Counter()

    def visit(computation, count):
        times[computation] += count
        for _, _, kind, rest in parsed[computation]:
            if kind == "while":
                turns = _TURNS.search(rest)
                body = re.search(r"body=%?([\w.-]+)", rest).group(1)
                visit(body, count * (int(turns.group(1)) if turns else 1))
            elif called := re.search(r"(?:calls|to_apply)=%?([\w.-]+)", rest):
                visit(called.group(1), count)

    visit(entry, 1)
    return [
        Instruction(name, kind.removesuffix("-start"), _shapes(result), rest, where, times[where])
        for where, lines in parsed.items()
        for name, result, kind, rest in lines
        if times[where]
    ]


def _shapes(text):
    return tuple(tuple(int(n) for n in dims.split(",") if n) for _, dims in _SHAPE.findall(text))


def collectives(text: str) -> list[Instruction]:
    return [i for i in instructions(text) if i.kind in COLLECTIVES]


def product_flops(text: str) -> int:
    """2 · multiplications of all matrix products that a run executes."""
    total, shape_of = 0, {}
    found = instructions(text)
    for i in found:
        shape_of[i.computation, i.name] = i.shapes[0] if i.shapes else ()
    for i in found:
        if i.kind != "dot":
            continue
        left = re.match(r"(?:\w+\[[\d,]*\]\S* )?%?([\w.-]+)", i.rest).group(1)
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.rest).group(1)
        sizes = shape_of[i.computation, left]
        contracted = math.prod(sizes[int(d)] for d in dims.split(",") if d)
        total += i.times * 2 * math.prod(i.shapes[0]) * contracted
    return total
