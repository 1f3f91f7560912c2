"""What the programs do to memory: pools stay where they are, and nothing else is as large."""

import jax
import numpy as np
import pytest
from support.engines import engine_of
from support.variants import FIVE

from lrkv_jax.inference import programs
from lrkv_jax.inference.schedule import SchedulerOutput


@pytest.fixture(autouse=True)
def as_users_compile(quick_programs):
    """Copies are what optimisation removes, so here it is on."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def memory_of(engine, program, *arguments, **static):
    """(Bytes of the pool, which comes back in the same buffers; those beside it)."""
    pool = engine.calls.cache()
    lowered = program.lower(engine.calls.model, pool, *arguments, **static)
    memory = lowered.compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(pool))
    assert memory.alias_size_in_bytes >= size
    return size, memory.temp_size_in_bytes


CASES = [*((name, 8192) for name in ("mha", "gqa", "mqa", "mla")), ("lrkv", 32_768)]


# P Q M of a chunk has a size of its own, and is not small beside a pool of 8,192 slots.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), CASES)
def test_steps_write_the_pool_in_place_and_copy_none_of_it(name, length):
    engine = engine_of(FIVE[name], length=length)
    calls = engine.calls
    arrays = calls.slots, calls.step_inputs(SchedulerOutput()), np.int32(16), np.False_, None
    pool, temporary = memory_of(engine, programs.decode, *arrays, most=16)
    assert temporary <= 0.15 * pool  # which 16 steps share


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mha", "lrkv"])
def test_a_piece_of_a_prompt_takes_as_much_memory_whatever_the_longest_request_is(name):
    temporary = []
    for length in (4096, 8192):
        engine = engine_of(FIVE[name], length=length)
        *arrays, _ = engine.calls.chunk_arrays(engine.calls.prefill, {})
        temporary.append(memory_of(engine, programs.prefill, *arrays, most=4)[1])
    assert temporary[1] <= 1.01 * temporary[0]
