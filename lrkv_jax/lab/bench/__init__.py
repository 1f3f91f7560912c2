"""Benchmarks: what decoding, training and serving cost, each variant beside its peers in one run.

All start from `variants` (those of a scale), time with `clock` and leave what `report` saves.
Decoding: `problems` makes a layer with a random cache, `implementations` the ways to attend to it,
`gate` checks them, `decode` runs a sweep, `decode_table` and `decode_plot` show it. Training:
`train` runs a sweep, `train_table` shows it. Serving: `serve` compares engines, `load` is a client
of any server.
"""
