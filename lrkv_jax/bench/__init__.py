"""Benchmarks: what decoding costs, each variant beside its peers, measured in one run.

`problems` makes random caches of a scale's shapes, `implementations` the ways to attend to them,
`clock` times them, `decode` runs a sweep, `table` and `plot` show it.
"""

from lrkv_jax.bench.decode import Settings, run

__all__ = ["Settings", "run"]
