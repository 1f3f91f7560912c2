"""The attention variants: one contract (`base`), one file a variant, each with its cache.

`make_attention(model_config)` builds the module that the configuration's entry names, and
`models.weights.draw` gives its weights their first numbers.
"""

from flax import nnx

from lrkv_jax.models.attention.base import Attention


def make_attention(config) -> Attention:
    """The attention layer of `config: ModelConfig`, of the class that its entry names."""
    return config.attention.layer_class()(config)


def abstract_layer(config) -> Attention:
    """The same with shapes in place of weights; nothing is allocated."""
    return nnx.eval_shape(lambda: make_attention(config))
