"""Data: sources, tokenizers, records of tokens, mixtures, the loader, chat formats, benchmark sets.

Importing this package is cheap: TFDS and Grain load with `dataset` and `loader` alone.
"""
