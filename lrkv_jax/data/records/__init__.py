"""Documents to records on disk: tokenised shard by shard, packed, resumed after a kill.

`builder` is what others call; the rest are its stages, each spread over processes.
"""
