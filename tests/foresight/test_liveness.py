"""Memory from a jaxpr: programs whose peak can be told by hand."""

import jax
import jax.numpy as jnp
import pytest

from lrkv_jax.foresight.liveness import CPU, GAPS, GPU, peak
from lrkv_jax.foresight.program import Array
from lrkv_jax.optim.muon import newton_schulz

N = 64
WHOLE = N * N * 4  # bytes of one float32 [N, N]


def needed(f, *shapes, donated=(), rules=GPU):
    """Bytes of f's peak in units of one [N, N], gaps left out, arguments included."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = jax.make_jaxpr(f)(*arguments).jaxpr
    held = [Array(a.shape, a.dtype, a.size, "parameters") for a in arguments]
    found = peak(jaxpr, held, donated, rules)
    return (found.bytes - found.by_kind["gaps"]) / WHOLE


SQUARE = (N, N)


def test_elementwise_work_lies_nowhere():
    assert needed(lambda x: jnp.exp(2 * x + 1).sum(), SQUARE) == pytest.approx(1, abs=0.01)


def test_a_product_reads_and_writes_whole_arrays():
    # x, its double (a product reads it), and the product.
    assert needed(lambda x: (2 * x) @ x, SQUARE) == 3
    # x and the first product; then both products; the first is gone when the third is made.
    assert needed(lambda x: ((x @ x) @ x) @ x, SQUARE) == 3


def test_a_result_takes_the_place_of_a_dying_operand():
    assert needed(lambda x: x @ x + 1, SQUARE) == 2
    assert needed(lambda x: x + 1, SQUARE) == 2
    assert needed(lambda x: x + 1, SQUARE, donated=[0]) == 1


def test_what_is_computed_twice_is_one_array():
    assert needed(lambda x: (x * 2) @ x + x @ (x * 2), SQUARE) == needed(
        lambda x: (y := x * 2) @ x + x @ y, SQUARE
    )


def test_what_passes_a_barrier_is_written_so_more_iterations_need_no_more_memory():
    def needed_by(iterations):
        return needed(lambda x: newton_schulz(x.astype(jnp.bfloat16), iterations), (N, 8 * N))

    assert needed_by(5) == needed_by(1)


def test_an_expensive_array_that_two_read_is_written_by_a_cpu_alone():
    def f(x):
        y = jnp.tanh(x @ x)
        return y.sum(0) + (y * y).sum(1)

    def g(x):
        y = x @ x
        return (z := jnp.tanh(y)).sum(0) + (z * y).sum(1)

    # In f the product dies as its tanh takes its place; in g both are read to the end.
    assert [round(needed(f, SQUARE, rules=r)) for r in (GPU, CPU)] == [2, 2]
    assert [round(needed(g, SQUARE, rules=r)) for r in (GPU, CPU)] == [2, 3]


def test_a_loop_holds_its_carry_once_its_stacks_whole_and_one_turn():
    def f(x):
        def turn(carry, _):
            carry = (carry @ x) @ x
            return carry, carry * 2

        return jax.lax.scan(turn, x, None, length=8)

    # x, the carry, eight stacked, and a turn's two products: the last waits to become the carry.
    assert needed(f, SQUARE) == 12


def test_a_dead_result_costs_nothing():
    def f(x):
        x @ x
        return x.sum()

    assert needed(f, SQUARE) == pytest.approx(1, abs=0.01)


def test_the_better_order_counts():
    """Two chains: one after the other needs less than side by side, as the program has them."""

    def f(x):
        a, b = [(x + i) @ x for i in range(4)], None
        for y in a:
            b = y.sum() if b is None else b + y.sum()
        return b

    assert needed(f, SQUARE) == pytest.approx(3, abs=0.01)


def test_gaps_are_counted_on_the_heap_and_not_on_arguments():
    jaxpr = jax.make_jaxpr(lambda x: x @ x)(jnp.zeros(SQUARE)).jaxpr
    held = [Array(SQUARE, jnp.dtype("float32"), N * N, "parameters")]
    found = peak(jaxpr, held, ())
    assert found.by_kind == {"parameters": WHOLE, "transient": WHOLE, "gaps": round(GAPS * WHOLE)}


def test_the_loops_of_a_gradient_say_what_is_kept_and_what_is_gradient():
    def loss(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum()

    ws, x = jnp.zeros((4, N, N)), jnp.zeros(SQUARE)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(ws, x).jaxpr
    held = [Array(a.shape, a.dtype, a.size, "parameters") for a in (ws, x)]
    found = peak(jaxpr, held, ())
    # Each layer keeps its input and 1 − tanh², or tanh.
    assert found.kept % (4 * WHOLE) == 0 and 1 <= found.kept / (4 * WHOLE) <= 3
    assert found.by_kind["gradients"] == 4 * WHOLE
