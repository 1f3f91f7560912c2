"""Data: sources, tokenizers, records of tokens, mixtures, the loader, chat formats, benchmark sets.

Importing this package is cheap: TFDS loads with `records`, `mixture` and `loader`, Grain with
`loader` alone.
"""
