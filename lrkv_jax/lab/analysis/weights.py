"""From a model's parameters to its heads as matrices, one layer at a time."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from lrkv_jax.config import ModelConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.attention import Attention, abstract_layer
from lrkv_jax.models.attention.head_weights import HeadWeights
from lrkv_jax.models.weights import with_weights


def check_has_heads(layer: Attention) -> None:
    """Raise `LrkvError` for a layer that does not say what its heads' matrices are."""
    if type(layer).head_weights is Attention.head_weights:
        raise LrkvError(
            f"attention.kind = {layer.config.attention.kind} cannot be analysed: give its layer "
            f"{type(layer).__name__} a method head_weights (docs/new_variant.md)"
        )


def head_weights(config: ModelConfig, params: Any) -> Iterator[HeadWeights]:
    """Each layer's heads, first to last, of parameters as `load_run(run).params` gives them.

    One layer is in float64 at a time: at 4096 × 4096 its matrices are 0.5 GB. The layer's input is
    what the matrices meet: the stream after its norm, and after that norm's gain where it has one.
    Raises `LrkvError` for weights that are not finite.
    """
    stacked = jax.tree.map(np.asarray, params["blocks"]["attention"])
    for name, leaf in stacked.items():
        if not np.isfinite(leaf).all():
            raise LrkvError(f"blocks.attention.{name} is not finite: analyse an earlier step")
    abstract = abstract_layer(config)
    check_has_heads(abstract)
    for layer in range(config.layers):
        weights = jax.tree.map(lambda leaf, at=layer: leaf[at], stacked)
        yield with_weights(abstract, weights).head_weights()
