"""Text to token records: sources and tokenizers, `records` and `mixture`, the loader; chats; tasks.

Importing this package is cheap: TFDS and Grain load with `dataset` and `loader` alone.
"""
