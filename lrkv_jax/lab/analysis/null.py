"""What the statistics say of heads that learnt nothing: the same variant with random weights."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from lrkv_jax.config import ModelConfig
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.analysis.diversity import diversity
from lrkv_jax.lab.analysis.statistics import deviation, mean
from lrkv_jax.lab.analysis.weights import check_has_heads
from lrkv_jax.models.attention import make_attention
from lrkv_jax.models.attention.head_weights import HeadWeights
from lrkv_jax.models.weights import draw


def random_heads(config: ModelConfig, seeds: int) -> Iterator[HeadWeights]:
    """One layer as it is initialised, for each of `seeds` seeds.

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


def null(drawn: Iterable[HeadWeights], layers: int) -> dict[str, Any]:
    """Mean and standard deviation of each number of `Diversity.summary` over random layers.

    {"query_key": {"mean", "sd", "sd_of_mean", "draws"}, "value_output": the same}: `sd` is of one
    layer, `sd_of_mean` of the mean over a model's `layers`, which are independent at the start.
    """
    found: dict[str, list[dict[str, Any]]] = {"query_key": [], "value_output": []}
    for heads in drawn:
        found["query_key"].append(diversity(*heads.query_key()).summary())
        found["value_output"].append(diversity(*heads.value_output()).summary())
    return {kind: _spread(summaries, layers) for kind, summaries in found.items()}


def _spread(summaries, layers):
    sd = deviation(summaries)
    return {
        "mean": mean(summaries),
        "sd": sd,
        "sd_of_mean": jax.tree.map(lambda number: number * layers**-0.5, sd),
        "draws": len(summaries),
    }
