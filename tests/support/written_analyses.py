"""`analysis.json` written by hand: heads of known cosines, and parts of known sizes."""

import json
from pathlib import Path

import numpy as np

from lrkv_jax.config import load_config
from lrkv_jax.lab.analysis.diversity import Diversity, centered, deviation, mean, spectrum

FORMS = ("query_key", "value_output")


def alike(heads: int, cosine: float) -> np.ndarray:
    """Every two heads have this cosine: 0 is orthogonal, 1 identical."""
    return np.full((heads, heads), cosine) + (1 - cosine) * np.eye(heads)


def write_analysis(run: Path, cosines, *, ranks=(), norm=2.0, weighted=None) -> Path:
    """What `lrkv analyze` leaves in a run's directory, of heads whose cosines at each layer are
    `cosines(layer)`.

    MHA's keys have the norm 2 where another's have `norm`; fits at `ranks` and at LRKV's own have
    errors that fall with the rank. `weighted` is the cosine of every two heads as text meets them,
    and of their logits there.
    """
    config = load_config(run / "config.yaml")
    model, own = config.model, config.model.attention.model_dump()
    layers = range(model.layers)
    has_parts = own["kind"] == "lrkv"
    ranks = sorted({*ranks, own.get("rank") or 1})
    step = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    result = {
        "run": str(run), "variant": config.attention, **own, "step": step, "layers": model.layers,
        "width": model.width, "heads": model.heads, "head_width": model.head_width,
    }  # fmt: skip
    drawn = np.random.default_rng(900).standard_normal((4, model.heads, 100))
    drawn /= np.linalg.norm(drawn, axis=2, keepdims=True)
    random = [_diversity(vectors @ vectors.T).as_dict() for vectors in drawn]
    null = {"mean": mean(random), "sd": deviation(random), "sd_of_mean": deviation(random),
            "draws": len(random)}  # fmt: skip
    for form in FORMS:
        found = [_diversity(cosines(layer)).as_dict() for layer in layers]
        result[form] = {"per_layer": found, "mean": mean(found), "null": null}
    parts = {"shared": 0.8 * norm, "residual": 0.6 * norm}
    norms = {"total": norm, **(parts if has_parts else dict.fromkeys(parts))}
    result["magnitude"] = {"per_layer": [{"key": norms, "value": norms}] * model.layers}
    result["geometry"] = None
    if has_parts and own["rank"]:
        geometry = [_each_family(lambda f, at=layer: _angles(model, own["rank"], at, f))
                    for layer in layers]  # fmt: skip
        result["geometry"] = {"per_layer": geometry, "mean": mean(geometry)}
    result["factorisation"] = [
        {
            "rank": rank,
            **{
                of: _each_family(lambda _, at=rank: _fits(model, own, at))
                for of in ("mean", "null")
            },
        }
        for rank in ranks
    ]
    if weighted is not None:
        one = {"gram": alike(model.heads, weighted).tolist(), "mean_off_diagonal": weighted}
        result["logits"] = {"tokens": 64, "per_layer": [one for _ in layers]}
        alike_too = [_diversity(alike(model.heads, weighted)).as_dict() for _ in layers]
        result["weighted"] = {
            "tokens": 64, **{form: {"mean": mean(alike_too), "null": null} for form in FORMS},
        }  # fmt: skip
    path = run / "analysis.json"
    path.write_text(json.dumps(result))
    return path


def _diversity(gram):
    heads = len(gram)
    return Diversity(gram, spectrum(gram, cap=heads), spectrum(centered(gram), cap=heads - 1))


def _each_family(make):
    return {family: make(family) for family in ("key", "value")}


def _angles(model, rank, layer, family):
    rng = np.random.default_rng((layer, family == "key"))
    cosine = rng.normal(0.25, 0.05, model.heads)
    principal = rng.uniform(0, 0.9, (model.heads, rank))
    return {
        "cosine": cosine.tolist(), "mean_cosine": float(cosine.mean()),
        "cosine_null_sd": (model.width * model.head_width) ** -0.5,
        "mean_square": float((principal**2).mean()),
        "mean_square_null": model.head_width / model.width,
    }  # fmt: skip


def _fits(model, own, rank):
    left = 1 - rank / model.head_width
    names = {"svd": 0.8, "mean_svd": 0.7, "alternating": 0.6}
    if own["kind"] == "lrkv":
        left = max(0.0, 1 - rank / own["rank"]) if own["rank"] else 0.0
    return {
        name: {"error": share * left, "form_error": 0.9 * share * left}
        for name, share in names.items()
    }  # fmt: skip
