"""Documents to records on disk: tokenized shard by shard, packed, resumed after a kill.

`build` is the road from source to manifest; `folders` are what is written and read.
"""
