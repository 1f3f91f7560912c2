"""Benchmarks: what decoding, training and serving cost, each variant beside its peers in one run.

`clock` times, `report` chooses the variants and writes what was measured. `decode` times attention
to a cache, which `problems` makes and checks; `train` times steps; `serve` compares engines.
"""
