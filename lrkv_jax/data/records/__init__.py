"""Records on disk from documents: tokenized shard by shard, packed, resumed after a kill.

`build` goes from source to manifest; `folders` has the files that are written and read.
"""
