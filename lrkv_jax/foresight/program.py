"""A traced program as operations on one device's arrays: calls inlined, renamings resolved.

Inside a `jax.shard_map` shapes are a device's already. Outside of one, an elementwise result is
split over devices as its operands are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jax.extend.core import Literal

KEPT, GRADIENTS, TRANSIENT = "kept", "gradients", "transient"
# Calls whose bodies belong to the program around them, as a loop's of one turn does.
INLINED = {
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "checkpoint",
    "remat2", "shard_map",
}  # fmt: skip
# The same bytes under another name.
RENAMED = {
    "reshape", "squeeze", "expand_dims", "transpose", "bitcast_convert_type", "stop_gradient",
    "name", "sharding_constraint", "pvary", "reduce_precision", "copy",
}  # fmt: skip
EXPENSIVE = {
    "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sin", "cos", "pow", "sqrt",
    "rsqrt", "erf", "erf_inv", "div",
}  # fmt: skip
ELEMENTWISE = EXPENSIVE | {
    "abs", "add", "add_any", "and", "argmax", "axis_index", "broadcast_in_dim", "ceil", "clamp",
    "clz", "concatenate", "convert_element_type", "dynamic_slice", "eq", "floor", "ge", "gt",
    "integer_pow", "iota", "is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "nextafter",
    "not", "or", "pad", "population_count", "random_unwrap", "random_wrap", "rem", "rev", "round",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "slice",
    "split", "square", "sub", "xor",
}  # fmt: skip
# Computed together with what makes their operands.
FUSED = ELEMENTWISE | {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}
# Results that may lie where an operand lay.
IN_PLACE = FUSED | {
    "dynamic_update_slice", "optimization_barrier", "scatter", "scatter-add", "psum",
    "psum_invariant", "pmax",
}  # fmt: skip
LOOPS = ("scan", "while", "cond")


@dataclass(eq=False)
class Array:
    """A value of the program. `elements` is a device's; `kind` says what it is to the reader."""

    shape: tuple[int, ...]
    dtype: Any
    elements: int
    kind: str = TRANSIENT

    @property
    def bytes(self) -> int:
        return self.elements * getattr(self.dtype, "itemsize", 8)

    @property
    def label(self) -> str:
        return f"{self.kind}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(eq=False)
class Operation:
    """One primitive. A loop has bodies; its first `len(carry)` results are its carry.

    `carry` are the operands that the carry starts from. `part` is `gradient`, `muon` or `update`;
    `axes` are the mesh axes of a collective, `turns` how often a loop's bodies run.
    """

    name: str
    scope: str
    part: str
    operands: list[Array]
    results: list[Array]
    bodies: list[Program] = field(default_factory=list)
    carry: list[Array] = field(default_factory=list)
    axes: tuple[str, ...] = ()
    turns: int = 1


class Program:
    """Operations in order, those alone whose results are read.

    `carry` are the arguments that the loop around the program hands on from turn to turn.
    """

    def __init__(
        self, operations: list[Operation], arguments: Sequence[Array], results: list[Array]
    ):
        self.arguments, self.results = list(arguments), results
        self.operations = _needed(operations, results)
        self.carry: list[Array] = []
        self.slices: list[Array] = []

    @classmethod
    def of(cls, jaxpr: Any, arguments: Sequence[Array], part: str = "update") -> Program:
        """The program of a jaxpr whose invars are `arguments` on a device.

        `part` is of what the program is a part, where no name in it says more.
        """
        operations: list[Operation] = []
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        results = _flatten(jaxpr, known, operations, {}, part)
        return cls(operations, arguments, results)

    @cached_property
    def depth_first(self) -> list[Operation]:
        """Each operation right after what it needs, the largest need first."""
        makers = {r: operation for operation in self.operations for r in operation.results}
        order: list[Operation] = []
        seen: set[Operation] = set()
        todo = [(makers[r], False) for r in reversed(self.results) if r in makers]
        while todo:
            operation, ready = todo.pop()
            if ready:
                order.append(operation)
            elif operation not in seen:
                seen.add(operation)
                todo.append((operation, True))
                needs = sorted(operation.operands, key=lambda array: array.bytes)
                todo.extend((makers[n], False) for n in needs if n in makers)
        return order

    @cached_property
    def kept(self) -> int:
        """Bytes of all that loops of the forward pass stack for the backward pass."""
        here = {r for o in self.operations for r in o.results if r.kind == KEPT}
        turns = [body.kept for o in self.operations for body in o.bodies]
        return sum(array.bytes for array in here) + max(turns, default=0)


def _needed(operations: list[Operation], results: list[Array]) -> list[Operation]:
    read, kept = set(results), []
    for operation in reversed(operations):
        if any(result in read for result in operation.results):
            kept.append(operation)
            read.update(operation.operands)
    return kept[::-1]


def _flatten(jaxpr, known: dict, operations: list[Operation], made: dict, part: str) -> list[Array]:
    """Append the jaxpr's operations; `known` has its inputs. Returns its results.

    `made` remembers elementwise results: what is computed twice from the same is one array.
    """

    def value(var):
        return _array_of(var) if isinstance(var, Literal) else known[var]

    for var in jaxpr.constvars:
        known[var] = _array_of(var)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        operands = [value(var) for var in equation.invars]
        here = _part(equation, part)
        if name in INLINED or (name == "scan" and equation.params["length"] == 1):
            body = next(bodies_of(equation))
            inner = dict(zip(body.invars, operands, strict=True))
            results = _flatten(body, inner, operations, made, here)
        elif name in RENAMED:
            results = operands
        else:
            key = _identity(equation, operands) if name in ELEMENTWISE else object()
            if key not in made:
                operations.append(_operation(equation, operands, here))
                made[key] = operations[-1].results
            results = made[key]
        known.update(zip(equation.outvars, results, strict=True))
    return [value(var) for var in jaxpr.outvars]


def _identity(equation, operands) -> tuple:
    """Equal for elementwise operations with the same result."""
    sources = (
        repr(var.val) if isinstance(var, Literal) else id(operand)
        for var, operand in zip(equation.invars, operands, strict=True)
    )
    return (equation.primitive.name, str(equation.params), *sources)


def _part(equation, around: str) -> str:
    """Of what an equation is a part: of what is around it, unless it or its body says more."""
    if "muon" in str(equation.source_info.name_stack):
        return "muon"
    return "gradient" if around == "update" and _differentiates(equation) else around


def _differentiates(equation) -> bool:
    return "jvp" in str(equation.source_info.name_stack) or any(
        _differentiates(inner) for body in bodies_of(equation) for inner in body.eqns
    )


def _operation(equation, operands: list[Array], part: str) -> Operation:
    name, scope = equation.primitive.name, str(equation.source_info.name_stack)
    results = [_result(var, equation, operands) for var in equation.outvars]
    if name not in LOOPS:
        pairs = zip(equation.invars, operands, strict=True)
        read = [operand for var, operand in pairs if not isinstance(var, Literal)]
        return Operation(name, scope, part, read, results, axes=_mesh_axes(equation))
    bodies = [Program.of(b, [_array_of(v) for v in b.invars], part) for b in bodies_of(equation)]
    loop = Operation(name, scope, part, operands, results, bodies)
    if name == "while":
        loop.carry = operands[-len(results) :]
        for body in bodies:
            body.carry = body.arguments[-len(results) :]
    elif name == "scan":
        loop.turns = equation.params["length"]
        _carry_and_stacks(loop, equation)
    return loop


def _mesh_axes(equation) -> tuple[str, ...]:
    named = equation.params.get("axes", equation.params.get("axis_name", ()))
    named = named if isinstance(named, tuple | list) else (named,)
    return tuple(axis for axis in named if isinstance(axis, str))


def _carry_and_stacks(scan: Operation, equation) -> None:
    """Tell a scan's carry from what it slices and stacks, and say what the stacks are for.

    Its operands are constants, the carry and what it slices; its results the carry and stacks.
    """
    body, jaxpr = scan.bodies[0], next(bodies_of(equation))
    outer, inner = scan.results, body.results

    def whole(out, into):  # what is sliced or stacked has an axis more outside
        return sum(len(_shape(o)) == len(_shape(i)) for o, i in zip(out, into, strict=True))

    carried = whole(equation.outvars, jaxpr.outvars)
    end = whole(equation.invars, jaxpr.invars)
    scan.carry = scan.operands[end - carried : end]
    body.carry, body.slices = body.arguments[end - carried : end], body.arguments[end:]
    backward, in_gradient = "transpose" in scan.scope, "jvp" in scan.scope
    stacks: dict[Array, Array] = {}
    for index, stack in enumerate(outer[carried:], carried):
        stack.kind = GRADIENTS if backward else KEPT
        outer[index] = stacks.setdefault(inner[index], stack)  # stacked twice, it is one stack
    if not in_gradient:  # the loop over microbatches carries the sum of their gradients
        for array in outer[:carried]:
            array.kind = GRADIENTS


def _result(var, equation, operands) -> Array:
    """What an operation makes, split over devices as its operands of the same shape are."""
    shape = _shape(var)
    whole = math.prod(shape)
    fractions = [
        operand.elements / whole
        for source, operand in zip(equation.invars, operands, strict=True)
        if whole and _shape(source) == shape
    ]
    return _array_of(var, min(fractions, default=1.0))


def _array_of(var, fraction: float = 1.0) -> Array:
    shape, aval = _shape(var), var.aval
    # What is offloaded lies in the host's memory.
    here = "host" not in str(getattr(aval, "memory_space", "")).lower()
    elements = round(math.prod(shape) * fraction) if here else 0
    return Array(shape, getattr(aval, "dtype", None), elements)


def _shape(var) -> tuple[int, ...]:
    return tuple(getattr(var.aval, "shape", ()))


def bodies_of(equation) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for parameter in equation.params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            body = getattr(item, "jaxpr", item)
            if hasattr(body, "eqns"):
                yield body
