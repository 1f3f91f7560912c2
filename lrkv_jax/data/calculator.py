"""The calculator that a model calls between its python and output tokens: arithmetic, no code."""

import ast
import operator
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

# A model's longest useful sum is far shorter; the bound keeps every number and the parse small.
MAX_LENGTH = 200
_ALLOWED = frozenset("0123456789+-*/.() ")
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_UNARY: dict[type, Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str | None:
    """The value of `+ - * / //` over decimal numbers and brackets, or None where there is none.

    The recipe's tool (nanochat, engine.py:use_calculator): commas are taken out of numbers, other
    characters and `**` are refused, and a wrong expression or a division by zero yields nothing.
    Two departures. An exact walk over the parsed tree replaces `eval`, so it needs no time limit.
    Results are written as in GSM8K's spans, from which the model has learnt:
    48/2 is `24`, not `24.0`; 0.1+0.2 is `0.3`; 1/3 is `0.3333333333333333`.

    Never raises; `expression` may be anything a model wrote.
    """
    plain = expression.replace(",", "").strip()
    if not plain or len(plain) > MAX_LENGTH or not _ALLOWED.issuperset(plain):
        return None
    try:
        return _written(_value(ast.parse(plain, mode="eval").body))
    # Some parsers raise MemoryError for too many brackets.
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return Fraction(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        # By its shortest decimals: 0.1 means a tenth, not the double next to it.
        return Fraction(str(node.value))
    raise ValueError("not arithmetic")


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    # As many digits as distinguish the double from its neighbors, and never an exponent.
    return format(Decimal(repr(float(value))), "f")
