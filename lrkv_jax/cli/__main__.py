"""`python -m lrkv_jax.cli` is the command `lrkv`."""

from lrkv_jax.cli import entry

entry()
