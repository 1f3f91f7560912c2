"""`analyze`: every statistic of a trained run's heads, as JSON."""

from collections.abc import Mapping, Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.data.loader import heldout_batches
from lrkv_jax.files import write_json
from lrkv_jax.inference.trained_run import TrainedRun
from lrkv_jax.interop.fits import root
from lrkv_jax.lab.analysis.activations import OnText, on_text, weighted
from lrkv_jax.lab.analysis.diversity import (
    FORMS,
    Diversity,
    diversity,
    mean,
    mean_off_diagonal,
    normalized,
    null,
)
from lrkv_jax.lab.analysis.factorization import factorization
from lrkv_jax.lab.analysis.heads import geometry, head_weights, magnitude, random_heads
from lrkv_jax.models.attention.head_weights import HeadWeights
from lrkv_jax.models.transformer import main_layers
from lrkv_jax.training.restore import load_run
from lrkv_jax.training.token_batch import BatchFormat


def head_diversity(config: ModelConfig, params: Any) -> dict[str, list[Diversity]]:
    """{"query_key", "value_output"}: each layer's heads compared, first layer to last.

    `params` as `load_run(run).params` gives them. Raises `LrkvError` where they are not finite.
    """
    layers = list(map(_diversities, head_weights(config, params)))
    return {form: [layer[form] for layer in layers] for form in FORMS}


def analyze(
    directory: str | Path,
    *,
    step: int | str | None = None,
    null_seeds: int = 8,
    ranks: Sequence[int] | None = None,
    batches: int = 0,
) -> dict[str, Any]:
    """Everything about a run's heads, at its newest step unless `step` names one or is "best".

    Writes it to `analysis.json` in the run's directory, and returns it (`docs/analysis.md` has the
    schema). `null_seeds` random layers make the null; factorizations are fitted at `ranks`, by
    default LRKV's rank, or that of the configuration's LRKV variant. With `batches` of the run's
    held-out records, heads' logits there are compared in "logits", and heads' forms again in
    "weighted", by the second moments of their inputs. Raises `LrkvError` for a run that cannot be
    read, weights that are not finite, and ranks that no head has.
    """
    run = load_run(directory, step=step)
    model = run.config.model
    ranks = _ranks(run.config) if ranks is None else ranks
    layers = [_layer(heads, ranks) for heads in head_weights(model, run.params)]
    random = random_heads(model, null_seeds)
    first = next(random)
    at_random = _layer(first, ranks)
    text = _on_text(run, batches) if batches else None
    result = {
        **_about(directory, run.config),
        "step": run.step,
        **_compared(layers, null(chain([first], random), len(layers))),
        "magnitude": _over_layers([layer["magnitude"] for layer in layers]),
        "geometry": layers[0]["geometry"] and _over_layers([one["geometry"] for one in layers]),
        "factorisation": [
            {
                "rank": rank,
                **_over_layers([layer["factorization"][index] for layer in layers]),
                "null": at_random["factorization"][index],
            }
            for index, rank in enumerate(ranks)
        ],
        "logits": text and _logits(text),
        "weighted": text and _weighted(run, text, null_seeds),
    }
    write_json(Path(directory) / "analysis.json", result)
    return result


def _layer(heads: HeadWeights, ranks: Sequence[int]) -> dict[str, Any]:
    """The analysis of one layer, so that only one is in memory."""
    return {
        **_diversities(heads),
        "magnitude": magnitude(heads),
        "geometry": geometry(heads),
        "factorization": [factorization(heads, rank) for rank in ranks],
    }


def _diversities(heads: HeadWeights) -> dict[str, Diversity]:
    return {form: diversity(*factors(heads)) for form, factors in FORMS.items()}


def _compared(layers: Sequence[Mapping[str, Any]], nulls: Mapping[str, Any]) -> dict[str, Any]:
    """{form: its diversity in each layer, the mean over layers, and that of random layers}."""
    return {
        form: {**_over_layers([layer[form].as_dict() for layer in layers]), "null": nulls[form]}
        for form in FORMS
    }


def _about(directory: str | Path, config: RunConfig) -> dict[str, Any]:
    """A description of the analyzed run."""
    model = config.model
    shape = {name: getattr(model, name) for name in ("layers", "width", "heads", "head_width")}
    shape["layers"] = len(main_layers(model))
    variant = model.attention.model_dump()  # its kind and its settings: rank, latent, …
    return {
        "run": str(directory), "variant": config.attention, **variant, **shape,
        "settings": model.model_dump(mode="json"),
    }  # fmt: skip


def _on_text(run: TrainedRun, batches: int) -> OnText:
    """The model's layers on the first `batches` of its run's held-out records."""
    config = run.config
    rows = BatchFormat.of(config, run.tokenizer.bos)
    context, batch = config.train.seq_len, config.train.global_batch_size
    texts = heldout_batches(config.data, context, batch, filled=False)  # padding is no text
    return on_text(config.model, run.params, islice(texts, batches), rows)


def _logits(text: OnText) -> dict[str, Any]:
    """Cosines of each layer's heads' logits."""
    grams = [normalized(gram_HH) for gram_HH in text.logits_LHH]
    layers = [
        {"gram": gram_HH.tolist(), "mean_off_diagonal": mean_off_diagonal(gram_HH)}
        for gram_HH in grams
    ]
    return {"tokens": text.tokens, **_over_layers(layers)}


def _weighted(run: TrainedRun, text: OnText, seeds: int) -> dict[str, Any]:
    """`_compared` on the inputs that held-out text makes, of the random layers too."""
    model, roots = run.config.model, [root(moment_DD) for moment_DD in text.moments_LDD]
    layers = list(map(_diversities, map(weighted, head_weights(model, run.params), roots)))
    rounds = -(-seeds // len(roots))  # each layer's inputs as often
    random = map(weighted, random_heads(model, rounds * len(roots)), cycle(roots))
    return {"tokens": text.tokens, **_compared(layers, null(random, len(layers), len(roots)))}


def _over_layers(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Each layer's numbers and their means; lists, such as one number per head, have none."""
    return {"per_layer": layers, "mean": mean(layers)}


def _ranks(config: RunConfig) -> list[int]:
    """The rank of the run, or else of its configuration's LRKV, or a quarter of a head."""
    variants = [config.model.attention, *config.variants.values()]
    found = [rank for one in variants if (rank := getattr(one, "rank", 0))]
    return found[:1] or [max(1, config.model.head_width // 4)]
