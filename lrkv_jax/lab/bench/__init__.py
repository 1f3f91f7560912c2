"""Benchmarks of decoding, training and serving, with all variants of a table in one run.

`clock` times, `report` chooses the variants and writes the results. `decode` times attention to a
cache, which `problems` makes and checks; `train` times steps; `serve` compares engines.
"""
