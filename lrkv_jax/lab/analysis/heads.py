"""A model's heads as matrices, layer by layer, and those of random weights."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from lrkv_jax.config import ModelConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.attention import Attention, abstract_layer, make_attention
from lrkv_jax.models.attention.head_weights import HeadWeights
from lrkv_jax.models.weights import draw, with_weights


def check_has_heads(layer: Attention) -> None:
    """Raise `LrkvError` for a layer that does not say what its heads' matrices are."""
    if type(layer).head_weights is Attention.head_weights:
        raise LrkvError(
            f"attention.kind = {layer.config.attention.kind} cannot be analyzed: give its layer "
            f"{type(layer).__name__} a method head_weights (docs/new_variant.md)"
        )


def head_weights(config: ModelConfig, params: Any) -> Iterator[HeadWeights]:
    """Each layer's heads, first to last, of parameters as `load_run(run).params` gives them.

    One layer is in float64 at a time: at 4096 × 4096 its matrices are 0.5 GB. The
    layer's input is what the matrices meet: the stream after its norm, and after that
    norm's gain where it has one. Raises `LrkvError` for weights that are not finite.
    """
    stacked = jax.tree.map(np.asarray, params["blocks"]["attention"])
    for name, leaf in stacked.items():
        if not np.isfinite(leaf).all():
            raise LrkvError(f"blocks.attention.{name} is not finite: analyze an earlier step")
    abstract = abstract_layer(config)
    check_has_heads(abstract)
    for layer in range(config.layers):
        weights = jax.tree.map(lambda leaf, at=layer: leaf[at], stacked)
        yield with_weights(abstract, weights).head_weights()


def random_heads(config: ModelConfig, seeds: int) -> Iterator[HeadWeights]:
    """One layer as it is initialized, for each of `seeds` seeds.

    Its output projection, which starts at zero and so has no direction, is drawn from a Gaussian:
    no statistic of forms asks for its scale. LRKV's residuals are a tenth of its shared part there,
    so that its null is nearly MQA's. Raises `LrkvError` for no seeds.
    """
    if seeds < 1:
        raise LrkvError(f"null_seeds = {seeds}: use 1 or more")
    for seed in range(seeds):
        layer = make_attention(config)
        check_has_heads(layer)
        draw(layer, jax.random.key(seed))
        heads = layer.head_weights()
        output_HKD = np.random.default_rng(seed).standard_normal(heads.output_HKD.shape)
        yield replace(heads, output_HKD=output_HKD)
