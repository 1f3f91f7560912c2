"""Settings as earlier versions wrote them, so that their runs and results can still be read."""

from __future__ import annotations

from typing import Any

# Settings that changed no result: whether a plan may refuse a run, how the GPU's decode kernel
# split sequences, and whether streams of documents were kept. "" holds whole groups.
GONE = {"": {"plan"}, "model": {"decode_bits"}, "data": {"keep_streams"}}
RENAMED = {
    "train": {
        "batch": "global_batch_size", "context": "seq_len", "accumulation": "grad_accum_steps",
        "keep": "max_checkpoints", "learn": "trainable",
    },
    "optimizer": {"warmup": "warmup_steps", "final_lr": "min_lr_ratio", "clip": "grad_clip"},
    "model": {"decode_cache": "kv_cache_dtype"},
    "data": {"licence": "license"},
    "mla": {"latent": "kv_lora_rank", "rope_width": "qk_rope_head_dim"},
}  # fmt: skip
ROLES = {"result": "semantics", "content": "data", "rhythm": "schedule", "place": "placement"}

# Metrics in the rows of `metrics.jsonl` and of archived runs.
METRICS = {
    "sampled_loss": "val_loss_subset",
    "sampled_bpb": "val_bpb_subset",
    "outside_step": "host_share",
}


def of_today(raw: dict[str, Any]) -> dict[str, Any]:
    """Settings of a configuration as they are called today; the argument stays as it is."""
    raw = {
        name: _renamed(name, group) if name in ("train", "optimizer", "data") else group
        for name, group in raw.items()
        if name not in GONE[""]
    }
    if isinstance(variants := raw.get("variants"), dict):
        raw["variants"] = {name: _variant(name, entry) for name, entry in variants.items()}
    if isinstance(model := raw.get("model"), dict):
        raw["model"] = _model(model)
    if isinstance(train := raw.get("train"), dict) and isinstance(train.get("teacher_model"), dict):
        raw["train"] = {**train, "teacher_model": _model(train["teacher_model"])}
    return raw


def _renamed(group: str, settings: Any) -> Any:
    if not isinstance(settings, dict):
        return settings
    names, gone = RENAMED[group], GONE.get(group, ())
    return {names.get(name, name): value for name, value in settings.items() if name not in gone}


def _model(settings: dict[str, Any]) -> dict[str, Any]:
    model = _renamed("model", settings)
    if model.get("kv_cache_dtype") == "whole":
        model["kv_cache_dtype"] = "auto"
    if model.get("train_kernel") in ("whole", "dot_product"):
        model["train_kernel"] = "chunked"
    return {key: _variant("", value) for key, value in model.items()}


def _variant(name: str, entry: Any) -> Any:
    """A variant's settings: LRKV had `tied`, and MLA the mode `latent`, which have kept runs."""
    if not isinstance(entry, dict):
        return entry
    kind = entry.get("kind", name)
    if entry.get("tied") is False or (kind == "lrkv" and "tied" in entry):
        tied = entry["tied"] is True
        entry = {key: value for key, value in entry.items() if key != "tied"}
        return {**entry, "kind": "lrkv_tied"} if tied else entry
    if kind in ("mla", "mla_latent"):
        entry = _renamed("mla", entry)
        return {**entry, "kind": "mla_latent"} if entry.get("rope") == "latent" else entry
    return entry


def metrics_of_today(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics with its columns as they are called today."""
    return {METRICS.get(name, name): value for name, value in row.items()}
