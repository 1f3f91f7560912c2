"""The memory that a traced program needs: its jaxpr, laid out in time with a compiler's rules.

Each operation has a time, in the program's order or depth first, whichever needs less: XLA tries
both. Each array that lies in memory is a buffer with a first and a last time. The rules:

- an elementwise result is fused into what reads it, and never lies in memory, unless a product, a
  collective, a kernel or a loop reads it; what so lies in memory and has several large operands is
  read there by all;
- a result takes the place of an operand of its size that nobody reads again;
- a loop holds its carry once, what it stacks whole, and what one turn of it needs;
- what is computed twice from the same arrays is one array;
- reshapes and transpositions cost nothing.

XLA then gives each buffer but the arguments an offset in one heap, and loses what lies between
them: `GAPS`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lrkv_jax.foresight.program import (
    ELEMENTWISE,
    EXPENSIVE,
    FUSED,
    IN_PLACE,
    Array,
    Operation,
    Program,
)

# What a heap loses between its buffers, of its size: with it the programs that docs/planning.md
# lists are 5 % below to 6 % above what XLA says.
GAPS = 0.06


@dataclass(frozen=True)
class Rules:
    """What differs between XLA's backends.

    `written_once`: what is read more than once is written if it is expensive to compute, or made
    from a reduction. A CPU's compiler does that, and hands reductions with what follows them to a
    library; a GPU's computes such things again from what lies in memory.
    """

    written_once: bool


GPU, CPU = Rules(written_once=False), Rules(written_once=True)


@dataclass(frozen=True)
class Peak:
    """What a program allocates on one device, arguments and the heap's gaps included, in bytes.

    `by_kind` is what is alive when most is, `largest` the largest arrays among it but for
    arguments. `kept` is all that loops of the forward pass stack for the backward pass.
    """

    bytes: int
    by_kind: dict[str, int]
    largest: list[tuple[str, int]]
    kept: int


def peak(
    jaxpr: Any, arguments: Sequence[Array], donated: Iterable[int], rules: Rules = GPU
) -> Peak:
    """What a program needs whose arguments are in memory as it starts.

    `arguments` are the invars as a device holds them. Those in `donated` are the program's own, to
    overwrite; none is ever given back.
    """
    program = Program.of(jaxpr, arguments)
    own = [arguments[index] for index in donated]
    stay = [array for array in arguments if array not in set(own)]
    found = []
    for depth_first in (False, True):
        layout = _Layout(rules, depth_first)
        layout.place_all(program, own)
        found.append(layout.most_alive())
    most, buffers = min(found, key=lambda pair: pair[0])
    by_kind: dict[str, int] = {}
    alive: list[Array | Buffer] = [*buffers, *stay]
    for one in alive:
        by_kind[one.kind] = by_kind.get(one.kind, 0) + one.bytes
    rows = [(b.label, b.bytes) for b in buffers if not b.argument]
    largest = sorted(rows, key=lambda row: -row[1])[:6]
    heap = most - sum(array.bytes for array in own)
    gaps = round(GAPS * heap)
    by_kind["gaps"] = gaps
    total = most + sum(array.bytes for array in stay) + gaps
    return Peak(total, by_kind, largest, program.kept)


@dataclass(eq=False)
class Buffer:
    """Bytes that are taken from time `start` to time `end`, both included."""

    bytes: int
    kind: str
    label: str
    start: int
    end: int = -1  # still open
    argument: bool = False


@dataclass
class _Layout:
    """The buffers of a program in time."""

    rules: Rules
    depth_first: bool
    buffers: list[Buffer] = field(default_factory=list)
    now: int = 0

    def place_all(self, program: Program, own: Sequence[Array]) -> None:
        """Lay out a whole program; `own` arguments may be overwritten."""
        places = {array: self._open(array, argument=True) for array in own}
        self._place(program, places, stacked=())
        for buffer in self.buffers:
            if buffer.end < 0 or buffer.argument:
                buffer.end = self.now

    def _open(self, array: Array, *, argument: bool = False) -> Buffer:
        buffer = Buffer(array.bytes, array.kind, array.label, self.now, argument=argument)
        self.buffers.append(buffer)
        return buffer

    def _place(self, program: Program, places: dict[Array, Buffer], stacked) -> None:
        """Lay out operations from now on; `places` has the arrays that lie in buffers already."""
        operations = program.depth_first if self.depth_first else program.operations
        lent = set(places.values())  # closed by whoever opened them
        slices = set(program.slices)
        written, last = _lifetimes(program, operations, set(stacked), self.rules)
        ends: dict[int, list[Array]] = {}
        for array, index in last.items():
            ends.setdefault(index, []).append(array)
        for index, operation in enumerate(operations):
            self.now += 1
            for operand in operation.operands:
                if operand in slices and operation.name not in FUSED and operand not in places:
                    places[operand] = self._open(operand)
            dying = [array for array in ends.get(index, ()) if array in places]
            for result in operation.results:
                if result in written and result not in places:
                    places[result] = self._room(operation, result, dying, places)
            for body in operation.bodies:
                self._turn(operation, body, places)
            for array in dying:
                if array in places:
                    buffer = places.pop(array)
                    if buffer not in lent:
                        buffer.end = self.now
        self.now += 1
        for buffer in places.values():
            if buffer not in lent:
                buffer.end = self.now

    def _room(self, operation, result, dying, places) -> Buffer:
        """A dying operand's buffer, or a new one."""
        if operation.bodies:
            index = operation.results.index(result)
            fits = operation.carry[index : index + 1]
        else:
            fits = dying if operation.name in IN_PLACE else ()
        for array in fits:
            if array in dying and array in places and array.bytes == result.bytes:
                dying.remove(array)
                return places.pop(array)
        return self._open(result)

    def _turn(self, operation: Operation, body: Program, places: dict[Array, Buffer]) -> None:
        """One turn of a loop: its carry lies in the buffers of the loop's results."""
        inside = {
            argument: places[result]
            for argument, result in zip(body.carry, operation.results, strict=False)
            if result in places
        }
        self._place(body, inside, stacked=body.results[len(operation.carry) :])

    # What it comes to.

    def most_alive(self) -> tuple[int, list[Buffer]]:
        """The most bytes alive at one time, and the buffers that are alive then."""
        change: dict[int, int] = {}
        for buffer in self.buffers:
            change[buffer.start] = change.get(buffer.start, 0) + buffer.bytes
            change[buffer.end + 1] = change.get(buffer.end + 1, 0) - buffer.bytes
        total, most, when = 0, 0, 0
        for time in sorted(change):
            total += change[time]
            if total > most:
                most, when = total, time
        return most, [b for b in self.buffers if b.start <= when <= b.end]


def _lifetimes(
    program: Program, operations: list[Operation], stacked: set[Array], rules: Rules
) -> tuple[set[Array], dict[Array, int]]:
    """The arrays that lie in memory, and the operation that reads each of them last."""
    end = len(operations)
    readers: dict[Array, int] = {}
    for operation in operations:
        for operand in set(operation.operands):
            readers[operand] = readers.get(operand, 0) + 1
    last = {array: end for array in program.results if array not in stacked}
    # Where what is fused into its readers is computed for the last time.
    again: dict[Array, int] = {}
    written = set()
    reduced = _made_from_reductions(operations)
    for index in range(end - 1, -1, -1):
        operation = operations[index]
        first = operation.results[0]
        large = sum(operand.elements >= first.elements for operand in set(operation.operands))
        # Written once where a second computation would cost much, or keep two arrays alive.
        dear = operation.name in EXPENSIVE or first in reduced
        once = rules.written_once and dear and readers.get(first, 0) > 1
        once = once or (large > 1 and any(result in last for result in operation.results))
        cheap = operation.name in ELEMENTWISE and not once
        computed = index
        for result in operation.results:
            if not cheap:
                last[result] = max(last.get(result, index), again.get(result, index))
            computed = max(computed, again.get(result, index) if cheap else index)
            if not cheap or result in last:
                written.add(result)
        for operand in operation.operands:
            where = again if operation.name in FUSED else last
            where[operand] = max(where.get(operand, -1), computed)
    for argument in program.arguments:
        last[argument] = max(last.get(argument, -1), again.get(argument, -1))
    return written, last


def _made_from_reductions(operations: list[Operation]) -> set[Array]:
    """Elementwise results of whole arrays and of what was reduced, as in x − max(x)."""
    small: set[Array] = set()
    made: set[Array] = set()
    for operation in operations:
        from_small = [operand in small for operand in operation.operands]
        if operation.name in FUSED - ELEMENTWISE:
            small.update(operation.results)
        elif operation.name in ELEMENTWISE and any(from_small):
            (small if all(from_small) else made).update(operation.results)
    return made
