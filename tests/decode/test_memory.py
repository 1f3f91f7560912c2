"""What the programs do to memory: caches stay where they are, and nothing else is as large."""

import jax
import numpy as np
import pytest
from support.engines import engine_of
from support.variants import FIVE

from lrkv_jax.decode import Sampling, programs

B, CHUNK, LENGTHS = 4, 32, (4096, 8192)


@pytest.fixture(autouse=True)
def as_users_compile(quick_programs):
    """Copies are what optimisation removes, so here it is on."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


def memory_of(engine, program, *arguments, **static):
    lowered = program.lower(engine.model, *arguments, **static)
    return lowered.compile().memory_analysis()


def bytes_of(cache):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


@pytest.mark.parametrize(
    "name",
    [n if n in ("mla", "lrkv") else pytest.param(n, marks=pytest.mark.slow) for n in FIVE],
)
def test_steps_write_the_cache_in_place_and_copy_none_of_it(name):
    engine = engine_of(FIVE[name], length=LENGTHS[1])
    lengths_B, some_B = np.ones(B, np.int32), np.zeros(B, bool)
    state = programs.DecodeState(
        engine.take_cache(), lengths_B, lengths_B, some_B, np.zeros(2, np.uint32), lengths_B
    )
    memory = memory_of(
        engine, programs.steps, state, np.int32(16), None, most=16, sampling=Sampling(), stop=()
    )
    # All that goes in comes back in the same buffers, and 16 steps share what is beside it.
    assert memory.alias_size_in_bytes >= bytes_of(state.cache)
    assert memory.temp_size_in_bytes <= 0.15 * bytes_of(state.cache)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "first"), [("mha", True), ("lrkv", False)])
def test_a_piece_of_a_prompt_takes_as_much_memory_whatever_the_caches_length(name, first):
    temporary = []
    for length in LENGTHS:
        engine = engine_of(FIVE[name], length=length)
        cache = engine.take_cache()
        last_BD = np.zeros((B, engine.config.width), np.float32)
        memory = memory_of(
            engine, programs.fill, cache, last_BD, np.zeros((B, CHUNK), np.int32),
            np.zeros(B, np.int32), np.ones(B, np.int32), first=first,
        )  # fmt: skip
        assert memory.alias_size_in_bytes >= bytes_of(cache)
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[1] <= 1.01 * temporary[0]
