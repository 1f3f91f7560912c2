"""`analyse`: every statistic of a trained run's heads, as JSON; `analyse_steps`: how they came."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.data.loader import heldout_batches
from lrkv_jax.errors import LrkvError
from lrkv_jax.files import write_json
from lrkv_jax.inference.trained_run import TrainedRun
from lrkv_jax.interop.fits import freedom, root
from lrkv_jax.lab.analysis.activations import OnText, on_text, weighted
from lrkv_jax.lab.analysis.diversity import (
    Diversity,
    compensation,
    diversity,
    mean_off_diagonal,
    normalised,
)
from lrkv_jax.lab.analysis.factorisation import factorisation, shared_energy
from lrkv_jax.lab.analysis.geometry import geometry
from lrkv_jax.lab.analysis.magnitude import magnitude
from lrkv_jax.lab.analysis.null import null, random_heads
from lrkv_jax.lab.analysis.statistics import mean
from lrkv_jax.lab.analysis.weights import head_weights
from lrkv_jax.models.attention.head_weights import HeadWeights
from lrkv_jax.training.checkpointing.inspect import entries
from lrkv_jax.training.restore import load_run
from lrkv_jax.training.run_dir import read_run
from lrkv_jax.training.token_batch import BatchFormat

FORMS = {"query_key": HeadWeights.query_key, "value_output": HeadWeights.value_output}


def head_diversity(config: ModelConfig, params: Any) -> dict[str, list[Diversity]]:
    """{"query_key", "value_output"}: each layer's heads compared, first layer to last.

    `params` as `load_run(run).params` gives them. Raises `LrkvError` where they are not finite.
    """
    layers = [
        {name: diversity(*factors(heads)) for name, factors in FORMS.items()}
        for heads in head_weights(config, params)
    ]
    return {name: [layer[name] for layer in layers] for name in FORMS}


def analyse(
    directory: str | Path,
    *,
    step: int | str | None = None,
    null_seeds: int = 8,
    ranks: Sequence[int] | None = None,
    batches: int = 0,
) -> dict[str, Any]:
    """Everything about a run's heads, at its newest step unless `step` names one or is "best".

    Writes it to `analysis.json` in the run's directory, and returns it (`docs/analysis.md` has the
    schema). `null_seeds` random layers make the null; factorisations are fitted at `ranks`, by
    default LRKV's own, or that of the configuration's LRKV line. With `batches` of the run's
    held-out records, heads' logits there are compared in "logits", and everything is computed again
    in "weighted", by the second moments of their inputs. Raises `LrkvError` for a run that cannot
    be read, weights that are not finite, and ranks that no head has.
    """
    run = load_run(directory, step=step)
    model = run.config.model
    ranks = _ranks(run.config, ranks)
    result = {**_about(directory, run.config), "step": run.step}
    layers, drawn = head_weights(model, run.params), random_heads(model, null_seeds)
    result |= _described(layers, drawn, ranks, model)
    text = _on_text(run, batches) if batches else None
    result["logits"] = text and _logits(text)
    result["weighted"] = text and _weighted(run, text, null_seeds, ranks)
    write_json(Path(directory) / "analysis.json", result)
    return result


def analyse_steps(directory: str | Path) -> dict[str, Any]:
    """The main statistics, as means over layers, of every checkpoint that the run still has.

    Writes {…, "steps": [{"step", "query_key", "value_output", "magnitude", "geometry",
    "shared_energy"}, …], "skipped": [{"step", "reason"}, …]} to `analysis_steps.json` in its
    directory, and returns it. A damaged step is skipped, and named. Raises `LrkvError` if there is
    no run or no sound step.
    """
    config = read_run(directory)
    result = {**_about(directory, config), "steps": [], "skipped": []}
    for entry in entries(directory):
        try:
            if entry.damage is not None:
                raise LrkvError(entry.damage)
            run = load_run(directory, step=entry.step)
        except LrkvError as error:
            result["skipped"].append({"step": entry.step, "reason": str(error)})
            continue
        result["steps"].append({"step": entry.step, **_moment(run)})
    if not result["steps"]:
        raise LrkvError(f"{directory} has no sound checkpoint: train it with train.save_every")
    write_json(Path(directory) / "analysis_steps.json", result)
    return result


def _about(directory: str | Path, config: RunConfig) -> dict[str, Any]:
    """What was analysed."""
    model = config.model
    shape = {name: getattr(model, name) for name in ("layers", "width", "heads", "head_width")}
    variant = model.attention.model_dump()  # its kind and its own settings: rank, latent, …
    return {
        "run": str(directory), "variant": config.attention, **variant, **shape,
        "settings": model.model_dump(mode="json"),
    }  # fmt: skip


def _described(
    heads: Iterable[HeadWeights],
    drawn: Iterable[HeadWeights],
    ranks: Sequence[int],
    model: ModelConfig,
    *,
    isotropic: bool = True,
) -> dict[str, Any]:
    """Every statistic of a model's layers, beside those of random ones.

    Factorisations, shared energy and geometry have one random layer beside them, the others all of
    them; `isotropic` is False of weighted heads.
    """
    drawn = iter(drawn)
    how = {"free": freedom(model), "groups": model.attention.key_heads(model)}
    first = next(drawn)
    layers = [_layer(layer, ranks, how, isotropic) for layer in heads]
    random = null(chain([first], drawn), model.layers)
    described: dict[str, Any] = {}
    for name in FORMS:
        found = [layer[name] for layer in layers]
        average = mean([each.summary() for each in found])
        described[name] = {
            "per_layer": [each.as_dict() for each in found],
            "mean": average,
            "null": random[name],
            "compensation": compensation(average, random[name]["mean"], model.heads),
        }
    described["magnitude"] = _over_layers([layer["magnitude"] for layer in layers])
    described["geometry"] = _over_layers([layer["geometry"] for layer in layers])
    if described["geometry"]:
        described["geometry"]["null"] = _numbers(geometry(first, isotropic=isotropic))
    energies = [layer["shared_energy"] for layer in layers]
    described["shared_energy"] = {
        "per_layer": energies, "mean": mean(energies), "null": shared_energy(first)
    }  # fmt: skip
    described["factorisation"] = [
        {
            "rank": rank,
            **_over_layers([layer["factorisation"][index] for layer in layers]),
            "null": factorisation(first, rank, **how),
        }
        for index, rank in enumerate(ranks)
    ]
    return described


def _on_text(run: TrainedRun, batches: int) -> OnText:
    """The model's layers on the first `batches` of its run's held-out records."""
    config = run.config
    rows = BatchFormat.of(config, run.tokenizer.bos)
    texts = heldout_batches(config.data, config.train.context, config.train.batch)
    return on_text(config.model, run.params, islice(texts, batches), rows)


def _logits(text: OnText) -> dict[str, Any]:
    """Cosines of each layer's heads' logits."""
    grams = [normalised(gram_HH) for gram_HH in text.logits_LHH]
    layers = [
        {"gram": gram_HH.tolist(), "mean_off_diagonal": mean_off_diagonal(gram_HH)}
        for gram_HH in grams
    ]
    return {"tokens": text.tokens, "per_layer": layers, "mean": mean(list(map(_numbers, layers)))}


def _weighted(run: TrainedRun, text: OnText, seeds: int, ranks: Sequence[int]) -> dict[str, Any]:
    """`_described` on the inputs that held-out text makes, of the random layers too."""
    model, roots = run.config.model, [root(moment_DD) for moment_DD in text.moments_LDD]
    layers = map(weighted, head_weights(model, run.params), roots)
    drawn = map(weighted, random_heads(model, seeds), cycle(roots))
    return {"tokens": text.tokens, **_described(layers, drawn, ranks, model, isotropic=False)}


def _layer(
    heads: HeadWeights, ranks: Iterable[int], how: Mapping[str, Any], isotropic: bool = True
) -> dict[str, Any]:
    return {
        **{name: diversity(*factors(heads)) for name, factors in FORMS.items()},
        "magnitude": magnitude(heads),
        "geometry": geometry(heads, isotropic=isotropic),
        "shared_energy": shared_energy(heads),
        "factorisation": [factorisation(heads, rank, **how) for rank in ranks],
    }


def _moment(run: TrainedRun) -> dict[str, Any]:
    layers = [_layer(heads, (), {}) for heads in head_weights(run.config.model, run.params)]
    forms = {name: mean([layer[name].summary() for layer in layers]) for name in FORMS}
    others = {
        name: whole and whole["mean"]
        for name in ("magnitude", "geometry", "shared_energy")
        for whole in [_over_layers([layer[name] for layer in layers])]
    }
    return {**forms, **others}


def _over_layers(layers: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Each layer's numbers and their means; lists, such as one number per head, have none."""
    if layers[0] is None:
        return None
    return {"per_layer": layers, "mean": mean([_numbers(layer) for layer in layers])}


def _numbers(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _numbers(value) if isinstance(value, dict) else value
        for name, value in tree.items()
        if not isinstance(value, list)
    }


def _ranks(config: RunConfig, ranks: Sequence[int] | None) -> list[int]:
    """The ranks to fit at."""
    if ranks is None:
        lines = [config.model.attention, *config.variants.values()]
        own = [rank for line in lines if (rank := getattr(line, "rank", 0))]
        return own[:1] or [max(1, config.model.head_width // 4)]
    most = min(config.model.width, config.model.head_width)
    wrong = [rank for rank in ranks if not 0 <= rank <= most]
    if wrong:
        raise LrkvError(f"rank = {wrong[0]}: use 0 to {most}")
    return list(ranks)
