"""The attention variants: one contract (`base`), and two files a variant.

`lrkv_config.py` has the settings, checks and counts of `lrkv.py`, which has its cache and its
layer. Settings are read without JAX, and so is this module. `make_attention(model_config)` builds
the layer that the variant names, and `models.weights.draw` gives its weights their first numbers.
"""

from lrkv_jax.models.attention.grouped_config import GQA, MHA, MQA
from lrkv_jax.models.attention.lrkv_config import LRKV
from lrkv_jax.models.attention.mla_config import MLA


def make_attention(config):
    """The attention layer of `config: ModelConfig`, of the class that its variant names."""
    return config.attention.layer_class()(config)


def abstract_layer(config):
    """The same with shapes in place of weights; nothing is allocated."""
    from flax import nnx

    return nnx.eval_shape(lambda: make_attention(config))
