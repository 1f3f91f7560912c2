"""Settings as earlier versions wrote them, so that their runs and results can still be read."""

from __future__ import annotations

from typing import Any

# Groups of settings that changed no result: whether a plan may refuse a run.
GONE = ("plan",)
# Of the model: how the GPU's decode kernel split sequences.
GONE_OF_MODEL = ("decode_bits",)

# Metrics in the rows of `metrics.jsonl` and of archived runs.
METRICS = {
    "sampled_loss": "val_loss_subset",
    "sampled_bpb": "val_bpb_subset",
    "outside_step": "host_share",
}


def of_today(raw: dict[str, Any]) -> dict[str, Any]:
    """Settings of a configuration as they are called today; the argument stays as it is."""
    raw = {name: value for name, value in raw.items() if name not in GONE}
    data = raw.get("data")
    if isinstance(data, dict):
        raw["data"] = {key: value for key, value in data.items() if key != "keep_streams"}
    variants = raw.get("variants")
    if isinstance(variants, dict):
        raw["variants"] = {name: _variant(name, entry) for name, entry in variants.items()}
    model = raw.get("model")
    if isinstance(model, dict):
        model = {key: value for key, value in model.items() if key not in GONE_OF_MODEL}
        raw["model"] = {key: _variant("", value) for key, value in model.items()}
    return raw


def _variant(name: str, entry: Any) -> Any:
    """A variant's settings: LRKV had `tied`, and MLA the mode `latent`, which have kept runs."""
    if not isinstance(entry, dict):
        return entry
    kind = entry.get("kind", name)
    if entry.get("tied") is False or (kind == "lrkv" and "tied" in entry):
        tied = entry["tied"] is True
        entry = {key: value for key, value in entry.items() if key != "tied"}
        return {**entry, "kind": "lrkv_tied"} if tied else entry
    if kind == "mla" and entry.get("rope") == "latent":
        return {**entry, "kind": "mla_latent"}
    return entry


def metrics_of_today(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics with its columns as they are called today."""
    return {METRICS.get(name, name): value for name, value in row.items()}
