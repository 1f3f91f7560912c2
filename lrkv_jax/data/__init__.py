"""Text to token records: sources, tokenizers, the record builder and the loader.

Importing this package is cheap: TFDS and Grain load with `builder` and `loader` alone.
"""
