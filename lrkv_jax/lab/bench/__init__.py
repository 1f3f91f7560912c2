"""Benchmarks: what decoding and training cost, each variant beside its peers, measured in one run.

Both start from `lines` (the variants of a scale), time with `clock` and leave what `report` saves.
Decoding: `problems` makes a layer with a random cache, `implementations` the ways to attend to it,
`gate` checks them, `whole` compiles a layer or a model, `decode` runs a sweep, `decode_table` and
`plot` show it, `tune` times plans of the compiled kernel, `instructions` counts what its loop asks
of a GPU. Training: `train_step` compiles a step, `train` runs a sweep, `train_table` shows it.
"""
