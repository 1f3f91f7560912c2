"""The attention variants: one contract (`base`), one file a variant, each with its cache.

`make_attention(model_config, rngs=...)` builds the module that the configuration's entry names.
"""

from importlib import import_module

from lrkv_jax.attention.base import Attention


def make_attention(config, *, rngs) -> Attention:
    """The attention layer of `config: ModelConfig`; the variant's entry names its class."""
    module, _, name = config.attention.implementation.partition(":")
    return getattr(import_module(f"lrkv_jax.attention.{module}"), name)(config, rngs=rngs)


__all__ = ["Attention", "make_attention"]
