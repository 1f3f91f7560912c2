"""Programs that run for milliseconds are compiled in a hurry."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def quick_programs():
    """Most of these tests' time is XLA's. What programs do to memory is tested without this."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
