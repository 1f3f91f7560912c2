"""Benchmarks: what decoding and training cost, each variant beside its peers, measured in one run.

Both start from `lines` (the variants of a scale), time with `clock`, write down what `report` says
and leave what `files` saves. Decoding: `problems` makes random caches of a scale's shapes,
`implementations` the ways to attend to them, `decode` runs a sweep, `table` and `plot` show it.
Training: `train_parts` compiles a step and its parts, `ceiling` measures the limit of products,
`host` what the host costs, `train` runs a sweep, `train_rows` and `train_table` show it.
"""
