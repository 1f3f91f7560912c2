"""A grid of runs: which there are (`grid`), how far each is (`state`), running them (`working`)."""

from lrkv_jax.sweep.grid import Point, grid
from lrkv_jax.sweep.state import State, state_of
from lrkv_jax.sweep.working import Outcome, work

__all__ = ["Outcome", "Point", "State", "grid", "state_of", "work"]
