"""A run that keeps less in its cache, near to another run but not equal: `lrkv convert`.

Keys and values of one layer after the other are fitted in closed form (`lrkv_jax.interop.fits`) on
what text shows of that layer, and the new run's heads read them as the old run's did. Nothing is
trained; `lrkv train NEW ... train.teacher=RUN` heals what is lost.

L layers  D model width  H heads  G key/value heads  K head width
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lrkv_jax import files
from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.config.attention import AttentionConfig
from lrkv_jax.config.history import asked_dtypes
from lrkv_jax.config.load import as_settings, config_from
from lrkv_jax.distributed.rules import parameter_shardings
from lrkv_jax.errors import LrkvError
from lrkv_jax.inference.trained_run import TrainedRun
from lrkv_jax.interop import fits
from lrkv_jax.interop.calibration import OWN, SECOND, TextRecords, calibrations, texts
from lrkv_jax.interop.fits import Calibration
from lrkv_jax.interop.importing import write_run
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token
from lrkv_jax.models.attention.head_weights import HeadWeights, in_float64
from lrkv_jax.models.transformer import abstract_parameters, specs, with_parameters
from lrkv_jax.training.restore import load_run
from lrkv_jax.training.run_dir import read_run
from lrkv_jax.training.token_batch import BatchFormat
from lrkv_jax.training.validate import make_validation

# Per unit of relative square error, logits cost this times as much as what heads write, squared:
# 10 to 20 times on SmolLM2-135M.
BALANCE = 4.0
NAMES = ("key", "value")
Biases = Mapping[str, np.ndarray]  # "query_bias" [H, K] and "key_bias" [G, K], or nothing
NONE: Biases = {}
SMALLEST = 8  # width or rank: caches are padded to eights
CONTEXT = 1024  # of the texts' records, unless the run's is shorter


@dataclass(frozen=True)
class LayerFit:
    """One layer's new weights, by name, and what they leave.

    Errors are relative square errors where keys and values are read; `condition` is
    that of the worst gauge, 1 where there is none.
    """

    weights: dict[str, np.ndarray]
    key_error: float
    value_error: float
    condition: float = 1.0

    @property
    def predicted(self) -> float:
        """The error by which widths are chosen."""
        return BALANCE**2 * self.key_error + self.value_error


def convert(
    source: str | Path,
    directory: str | Path,
    settings: Sequence[str],
    *,
    step: int | str | None = None,
    names: Sequence[str] = (OWN, SECOND),
    share: float | None = None,
    tokens: int = 8192,
    heldout: int = 16384,
    context: int | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Write a run whose attention is that of `settings`, `attention=KIND attention.NAME=VALUE ...`.

    It learns from `tokens` of each text that is named (`calibration.texts`), and is measured on
    `heldout` others. `share` chooses the widths that fit into this share of the run's cache.
    Returns what it also writes to `conversion.json`: errors per layer, losses before and after, and
    bytes. `progress` is called with what is done, how much of it, and of how much.

    Raises `LrkvError`, and leaves no run, where such a run cannot be converted so.
    """
    with files.whole_folder(directory) as fresh:
        run = load_run(source, step=step)
        config, model = run.config, run.config.model
        old = _source(model, source)
        new_config = _asked(config, old, settings)
        context = context or min(CONTEXT, config.train.seq_len)
        found = texts(names, config, run.tokenizer, context=context, learnt=tokens, heldout=heldout)
        learnt = list(found)
        how = BatchFormat.of(config, run.tokenizer.bos)
        rows_NU = np.concatenate([text.learnt_NU for text in learnt])
        seen: Iterable[Calibration] = calibrations(model, run.params, rows_NU, how)
        if share is not None:
            seen = list(_counted(seen, "reading", model.layers, progress))
            narrowed = partial(_asked, config, old)
            new_config = _within(narrowed, settings, run, seen, share, progress)
        new = new_config.model
        counted = _counted(seen, "fitting", model.layers, progress)
        of_layers = zip(heads_of(model, run.params), counted, strict=True)
        fitted = [
            fit_layer(new, layer, heads, calibration, biases)
            for layer, ((heads, biases), calibration) in enumerate(of_layers)
        ]
        params = fitted_parameters(new, run.params, fitted, run.mesh)
        models = run, replace(run, config=new_config, params=params)
        before, after = (losses(learnt, one) for one in _counted(models, "loss", 2, progress))
        loss = {name: {"before": before[name], "after": after[name]} for name in before}
        report = _report(source, run.step, model, new, fitted, loss, len(rows_NU) * context)
        variants = {new_config.attention: new.attention}
        changed = {"variants": variants, "run_dir": str(directory)}
        changed |= {"init_from": None, "init_step": None}
        files.write_json(fresh / "conversion.json", report)
        new_config = _as_requested(new_config, source).model_copy(update=changed)
        write_run(fresh, directory, new_config, params, run.tokenizer)
    return report


def _as_requested(config: RunConfig, source: str | Path) -> RunConfig:
    """The configuration with the dtypes that were requested for the run: auto may be one."""
    saved = read_run(source)
    muon = saved.optimizer.muon
    dtype, of_muon = asked_dtypes(source, saved.model.dtype, muon.dtype)
    optimizer = config.optimizer.model_copy(
        update={"muon": muon.model_copy(update={"dtype": of_muon})}
    )
    model = config.model.model_copy(update={"dtype": dtype})
    return config.model_copy(update={"model": model, "optimizer": optimizer})


def _source(model: ModelConfig, source: str | Path) -> AttentionConfig:
    """The entry of a model whose keys are linear in a layer's input and rotated whole."""
    entry = model.attention
    if model.layers_pattern is not None:
        raise LrkvError(
            f"{source} has layers of several kinds, model.layers_pattern = "
            f"{model.layers_pattern}: convert a model of one kind"
        )
    if entry.mode != "full" or (entry.name == "mla" and entry.latent_norm):
        raise LrkvError(
            f"{source} is {entry.label}: convert a run of MHA, GQA, MQA, or LRKV in rope: full"
        )
    return entry


def _asked(config: RunConfig, old: AttentionConfig, settings: Sequence[str]) -> RunConfig:
    """The run's configuration with another attention, checked as any other and for what fits it."""
    if strange := [one for one in settings if not one.startswith(("attention=", "attention."))]:
        raise LrkvError(f"{strange[0]}: a conversion changes attention alone: leave it out")
    if not any(one.startswith("attention=") for one in settings):
        raise LrkvError("no attention=KIND is given: use attention=lrkv or attention=mla")
    groups = old.key_heads(config.model)
    shared = {"rope": "full", "kv_heads": None if groups == config.model.heads else groups}
    raw = as_settings(config)
    raw["variants"] = {
        "lrkv": {**shared, "rank": SMALLEST},
        "mla": {**shared, "kv_lora_rank": SMALLEST, "latent_norm": False},
    }
    new = config_from(raw, "lrkv convert", settings)
    entry = new.model.attention
    if entry.mode != "full" or (entry.name == "mla" and entry.latent_norm):
        raise LrkvError(
            f"{entry.label}: a pretrained model's keys are rotated whole and linear in their "
            "input: leave attention.rope and attention.latent_norm out"
        )
    if new.model.width < new.model.head_width:
        raise LrkvError("model.width is smaller than model.head_width: convert another model")
    if entry.name == "lrkv" and not entry.rank:
        raise LrkvError(f"{entry.label}: give a rank of 1 or more")
    widest = _widest(new.model)
    if entry.name == "mla" and entry.kv_lora_rank > widest:
        raise LrkvError(
            f"attention.kv_lora_rank = {entry.kv_lora_rank}: keys and values have {widest} "
            "columns: use up to that"
        )
    if entry.key_heads(new.model) % groups:
        raise LrkvError(
            f"attention.kv_heads: the model has {groups} keys: use that, or leave it out"
        )
    return new


def _widest(model: ModelConfig) -> int:
    """The width of a latent that spans all keys and values."""
    return min(model.width, 2 * model.attention.key_heads(model) * model.head_width)


def fit_layer(
    model: ModelConfig,
    layer: int,
    heads: HeadWeights,
    calibration: Calibration,
    biases: Biases = NONE,
) -> LayerFit:
    """The weights of `model`'s attention that represent these heads, in float64.

    Raises `LrkvError`, naming the layer, for heads whose keys, values or outputs are all zero.
    """
    with contextlib.suppress(np.linalg.LinAlgError), np.errstate(invalid="ignore"):
        found = _fit(model, heads, calibration, biases)
        if max(found.key_error, found.value_error) < 2:  # not of NaN; of no fit at all it is 1
            return found
    raise LrkvError(
        f"layer {layer} has heads whose queries, values or outputs are zero, as before training or "
        "after pruning: convert another model"
    )


def _fit(model, heads, calibration, biases):
    entry = model.attention
    G = entry.key_heads(model)
    each = model.heads // G
    families = [family[::each] for family in (heads.key_HDK, heads.value_HDK)]
    of_keys_GK = calibration.of_keys(G)
    readers = [
        of_keys_GK[:, :, None] * np.eye(model.head_width),
        fits.reader_of_values(heads.output_HKD, G),
    ]
    reduced = fits.Reduced.of(calibration.moment_DD, *families)
    weights = {"query": heads.query_HDK, "output": heads.output_HKD}
    condition = 1.0
    if biases:  # with more heads of keys than there were, several have one's
        key_bias_GK = biases["key_bias"]
        weights["key_bias"] = np.repeat(key_bias_GK, G // len(key_bias_GK), axis=0)
    if entry.name == "mla":
        found = fits.joint(reduced, readers, entry.kv_lora_rank, entry.rank, weights=(BALANCE, 1.0))
        totals = found.total
        weights |= {"down": found.down_DC}
        weights |= {f"up_{n}": up.swapaxes(0, 1) for n, up in zip(NAMES, found.up, strict=True)}
        if entry.rank:
            weights |= {"private_down": found.own_GDR}
            weights |= {f"private_{n}": up for n, up in zip(NAMES, found.own_up, strict=True)}
    else:
        rank_key, rank_value = entry.ranks
        keys = fits.shared_keys(
            reduced.parts[0], reduced.back_DM, of_keys_GK, rank_key, free=fits.freedom(model)
        )
        values = fits.shared_values(reduced.parts[1], reduced.back_DM, readers[1], rank_value)
        totals = keys.total_GDK, values.total_GDK
        condition = max(keys.condition, values.condition)
        for name, fit in zip(NAMES, (keys, values), strict=True):
            weights |= {name: fit.shared_DK, f"{name}_down": fit.down_GDR}
            weights |= {f"{name}_up": fit.up_GRK}
        turned = np.repeat(keys.gauge_GKK, each, axis=0)
        weights["query"] = heads.query_HDK @ turned.swapaxes(1, 2)
        weights["output"] = np.repeat(values.gauge_GKK, each, axis=0) @ heads.output_HKD
        if biases:
            weights["query_bias"] = np.einsum("HK,HLK->HL", biases["query_bias"], turned)
            inverse_GKK = np.linalg.inv(keys.gauge_GKK)
            weights["key_bias"] = np.einsum("GK,GKL->GL", weights["key_bias"], inverse_GKK)
    weights["query"] = weights["query"].swapaxes(0, 1)
    key_error, value_error = (
        fits.relative_error(family, total, calibration.moment_DD, reader)
        for family, total, reader in zip(families, totals, readers, strict=True)
    )
    return LayerFit(weights, key_error, value_error, condition)


def heads_of(model: ModelConfig, params: Any) -> Iterable[tuple[HeadWeights, Biases]]:
    """Each layer's heads, and what is added to its queries and keys, by name.

    One layer's weights at a time are on the host.
    """
    blocks = with_parameters(model, params).blocks
    for layer in range(model.layers):
        attention = jax.tree.map(lambda leaf, at=layer: leaf[at], blocks).attention
        named = ("query_bias", "key_bias") if model.qkv_bias else ()
        yield (
            attention.head_weights(),
            {name: in_float64(getattr(attention, name)) for name in named},
        )


def _counted(each, what, total, progress):
    for done, one in enumerate(each):
        progress(what, done, total)
        yield one
    progress(what, total, total)


def _within(
    narrowed: Callable[[Sequence[str]], RunConfig], settings, run, seen, share, progress
) -> RunConfig:
    """The configuration whose cache fits into a share of the run's, and whose errors are least.

    LRKV's ranks are tried from all for keys to all for values, MLA's latent as wide as fits next to
    the requested private latents. Every fourth layer is fitted with each.
    """
    model = run.config.model
    own = cache_allocated_bytes_per_token(model)
    sampled_layers = range(0, model.layers, 4)
    heads = {
        at: one for at, (one, _) in enumerate(heads_of(model, run.params)) if at in sampled_layers
    }

    def of(**widths) -> RunConfig:
        return narrowed([*settings, *(f"attention.{name}={n}" for name, n in widths.items())])

    def fits_in(one: RunConfig) -> bool:
        return cache_allocated_bytes_per_token(one.model) <= share * own

    most = narrowed(settings).model
    mla = most.attention.name == "mla"
    chosen = ("kv_lora_rank",) if mla else ("rank", "rank_key", "rank_value")
    for setting in settings:
        if setting.partition("=")[0].removeprefix("attention.") in chosen:
            raise LrkvError(f"{setting}: --bytes chooses that: leave one of them out")
    if mla:
        widths = range(SMALLEST, _widest(most) + 1, 8)
        found = [one for C in widths if fits_in(one := of(kv_lora_rank=C))]
        tried = found[-1:]
    else:
        ranks = range(SMALLEST, most.head_width + 1, 8)
        widest = {}
        for k, v in itertools.product(ranks, ranks):
            if fits_in(one := of(rank=max(k, v), rank_key=k, rank_value=v)):
                widest[k] = v, one
        tried = list(dict(widest.values()).values())  # of one rank of values the widest of keys
    if not tried:
        raise LrkvError(
            f"--bytes {share:g}: no width of {most.attention.name} is so small next to {own} bytes "
            "a token: give more, or another kind"
        )
    if len(tried) == 1:
        return tried[0]
    costs = [
        sum(fit_layer(one.model, at, heads[at], seen[at]).predicted for at in sampled_layers)
        for one in _counted(tried, "choosing widths", len(tried), progress)
    ]
    return tried[int(np.argmin(costs))]


def fitted_parameters(new: ModelConfig, params: Any, fitted: list[LayerFit], mesh: Any) -> Any:
    """The old model's parameters with the attention of the fits, each device's share put there."""
    shapes = abstract_parameters(new)
    shardings = parameter_shardings(specs(new), shapes, mesh)["blocks"]["attention"]
    made = {}
    for name, shape in shapes["blocks"]["attention"].items():
        if name not in fitted[0].weights:
            made[name] = params["blocks"]["attention"][name]
            continue
        stacked = np.stack([np.float32(layer.weights[name]) for layer in fitted])
        assert stacked.shape == shape.shape, (name, stacked.shape, shape.shape)
        made[name] = jax.make_array_from_callback(shape.shape, shardings[name], stacked.__getitem__)
    return {**params, "blocks": {**params["blocks"], "attention": made}}


def losses(found: Sequence[TextRecords], run: TrainedRun) -> dict[str, float]:
    """Cross-entropy of a run on the held-out records of each text, by its name, in nats a token."""
    config = run.config
    validate = make_validation(
        config.model, run.mesh, run.tokenizer.token_bytes_up_to(config.model.vocabulary),
        chunk=config.train.loss_chunk, batch_format=BatchFormat.of(config, run.tokenizer.bos),
    )  # fmt: skip
    measured = {}
    for text in found:
        rows_NU, batch = text.heldout_NU, min(4, len(text.heldout_NU))
        batches = [rows_NU[at : at + batch] for at in range(0, len(rows_NU), batch)]
        measured[text.name] = validate(run.params, batches).cross_entropy
    return measured


def _report(source, step, model, new, fitted, loss, tokens) -> dict[str, Any]:
    own, cache = (cache_allocated_bytes_per_token(each) for each in (model, new))
    return {
        "source": str(source),
        "step": step,
        "attention": new.attention.model_dump(mode="json"),
        "bytes_per_token": {"before": own, "after": cache, "share": cache / own},
        "tokens": tokens,
        "loss": loss,
        "layers": [
            {"key_error": one.key_error, "value_error": one.value_error,
             "condition": one.condition}
            for one in fitted
        ],
    }  # fmt: skip
