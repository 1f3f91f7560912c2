"""The calculator against exact arithmetic on generated sums, and on what a model may write."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrkv_jax.data.calculator import MAX_LENGTH, calculate

# Sums as (text, value), value None where a division by zero is in them.
NUMBERS = st.one_of(
    st.integers(0, 99_999).map(lambda n: (str(n), Fraction(n))),
    st.integers(1000, 99_999).map(lambda n: (f"{n:,}", Fraction(n))),
    st.decimals(0, 999, places=2).map(lambda d: (str(d), Fraction(d))),
)


def joined(pair, sign, space):
    (left, a), (right, b) = pair
    text = f"({left}){space}{sign}{space}({right})"
    if a is None or b is None or (sign == "/" and b == 0):
        return text, None
    return text, {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]


SUMS = st.recursive(
    NUMBERS,
    lambda inner: st.builds(
        joined, st.tuples(inner, inner), st.sampled_from("+-*/"), st.sampled_from(["", " "])
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(SUMS)
def test_a_sum_is_its_exact_value_to_a_doubles_digits(pair):
    text, value = pair
    if len(text.replace(",", "")) > MAX_LENGTH or value is None:
        assert calculate(text) is None
        return
    got = calculate(text)
    if value.denominator == 1:
        assert got == str(int(value))  # never 24.0
    else:
        assert "e" not in got
        assert float(got) == float(value)


@settings(max_examples=200, deadline=None)
@given(
    st.text("0123456789+-*/.() ,", max_size=250) | st.text("12+*/().,e_x=<>'\n\0é日", max_size=20)
)
def test_nothing_that_is_written_raises(text):
    got = calculate(text)
    assert got is None or Fraction(got) is not None


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("48/2", "24"),
        ("0.1+0.2", "0.3"),
        ("1/3", "0.3333333333333333"),
        ("1/100000", "0.00001"),
        ("1,200 * 3", "3600"),
        ("-1/4", "-0.25"),
        (" 2*(3+4) ", "14"),
        ("7//2", "3"),
        (".5+.5", "1"),
    ],
)
def test_results_are_written_as_gsm8k_writes_them(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        *("", " ", ",", "()", "...", "(", "1+", "1 2", "1(2)", "(1)(2)", "007", "1..2"),
        *("1/0", "1//0", "0/(3-3)", "2**3", "9*(9**9)", "2*\n3", "1\x00", "１+１"),
        *("x", "1e9", "0x10", "1_000", "1j", "5%", "1<<9", "[1]", "1;2", "1=1", "1 if 1 else 2"),
        *("__import__('os')", "'a'.count('a')", "(1).real", "(1,2)"[:1] + "lambda:0)"),
        "1+" * (MAX_LENGTH // 2) + "1",
        "(" * 150 + "1" + ")" * 150,
        "9" * 10_000,
    ],
)
def test_what_is_not_a_short_sum_has_no_result(expression):
    assert calculate(expression) is None
