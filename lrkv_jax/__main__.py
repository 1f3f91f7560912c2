"""`python -m lrkv_jax` is the command `lrkv`."""

from lrkv_jax.cli import entry

entry()
