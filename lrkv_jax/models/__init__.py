"""The Transformer, its layers, and the attention variants."""
