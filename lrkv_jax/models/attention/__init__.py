"""The attention variants: one contract (`base`), and two files a variant.

`lrkv_config.py` has the settings, checks and counts of `lrkv.py`, which has its cache and its
layer. Settings are read without JAX, and so is this module. `make_attention(model_config, rngs=…)`
makes the layer that the variant names, ready for any model.
"""

from lrkv_jax.models.attention.grouped_config import GQA, MHA, MQA
from lrkv_jax.models.attention.lrkv_config import LRKV
from lrkv_jax.models.attention.mla_config import MLA


def make_attention(config, *, rngs, axis_rules=None):
    """The attention layer of `config: ModelConfig`, a module x [B, T, D] → [B, T, D] for any model.

    Its weights are drawn from `rngs` (`nnx.Rngs`); the output projection starts at zero, so that a
    fresh layer adds nothing to the stream. `axis_rules`, pairs or a mapping, have a logical axis,
    one of `RULES` in `lrkv_jax.distributed.rules`, and the mesh axis, the mesh axes, or None that
    shards it, as flax has them: ("batch", "data"), ("heads", "model"). They define how sequences
    and heads are split on the mesh in use. With them the weights carry their axes' names, so that
    `nnx.get_partition_spec` finds their placement; () leaves the rules to flax's context. Raises
    `LrkvError` for an axis that does not exist.
    """
    from flax import nnx

    from lrkv_jax.config import ModelConfig
    from lrkv_jax.distributed.rules import check_rules
    from lrkv_jax.errors import LrkvError
    from lrkv_jax.models.weights import draw, name_axes

    if not isinstance(config, ModelConfig):
        raise LrkvError(
            f"make_attention of a {type(config).__name__}: give a ModelConfig, as in "
            "ModelConfig(width=64, heads=4, head_width=16, attention=LRKV(rank=8))"
        )
    if not (isinstance(rngs, nnx.Rngs) and hasattr(rngs, "params")):
        raise LrkvError(f"rngs = {str(rngs)[:60]}: give nnx.Rngs, as in rngs=nnx.Rngs(0)")
    layer = config.attention.layer_class()(config.main_kind)
    draw(layer, rngs.params())
    if axis_rules is not None:
        layer.axis_rules = check_rules(axis_rules)
        name_axes(layer, layer.axis_rules)
    return layer


def abstract_layer(config):
    """The attention layer with shapes instead of weights; nothing is allocated.

    With a `layers_pattern`, one of layers G.
    """
    from flax import nnx

    return nnx.eval_shape(lambda: config.attention.layer_class()(config.main_kind))
