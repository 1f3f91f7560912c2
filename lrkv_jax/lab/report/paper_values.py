"""The paper's printed values, as data; a value that does not hold has a verdict with the reason.

The values are those of arXiv 2601.11471's source, in `paper_values.yaml`; the verdicts
next to them were recomputed, and the tests recompute them again.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lrkv_jax.config import RunConfig, load_config
from lrkv_jax.lab.report.comparison.runs import RunRecord
from lrkv_jax.models.accounting.counts import training_tokens

# The shipped configurations of the paper's scales, with the paper's names for them.
SCALES = {"128m": "128M", "512m_8k": "512M", "1.2b": "1.2B", "2.5b": "2.5B", "6.3b": "6.3B"}

KINDS = ("mha", "gqa", "mqa", "mla", "lrkv")  # the variants that the paper compares, in its order


@dataclass(frozen=True)
class PaperValue:
    """A printed value, its text to the printed digit, and the verdict where it does not hold."""

    value: float | None  # None if it is not a number, as 18-25
    text: str
    verdict: str = ""


def paper_value(*path: str) -> PaperValue | None:
    """The value at a place of `paper_values.yaml`, as in ("table01", "128m", "lrkv", "ce").

    None where the paper prints nothing. A verdict applies to its place and all below it.
    """
    node: Any = _data()
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    if node is None or isinstance(node, dict):
        return None
    text = str(node)
    try:
        value = float(text.rstrip("*").replace(",", ""))
    except ValueError:
        value = None
    return PaperValue(value, text, verdict(*path))


def paper_table(name: str) -> dict[str, Any]:
    """All values that the paper prints in one table or figure."""
    return _data()[name]


def verdict(*path: str) -> str:
    """The error in the value at a place, or at a place above it; "" if there is none."""
    verdicts = _data()["verdicts"]
    places = ["/".join(path[:depth]) for depth in range(len(path), 0, -1)]
    return next((verdicts[place] for place in places if place in verdicts), "")


@cache
def _data() -> dict[str, Any]:
    text = Path(__file__).with_name("paper_values.yaml").read_text(encoding="utf-8")
    # As text: 2.530 must stay 2.530.
    return yaml.load(text, yaml.BaseLoader)


def beside(table: str, run: RunRecord, what: str) -> PaperValue | None:
    """The value in the paper's `table` for the setting that a run repeats, or None.

    Compared are the model's shape, the variant with its size, the context, the batch,
    the number of tokens and their source, against the paper's scale as it is shipped.
    """
    scale = _paper_scale(run)
    if scale is None:
        return None
    ablated = paper_value(table, scale, f"{run.kind}_{run.size}", what)
    same = shipped(scale).variants[run.kind] == run.config.model.attention
    return ablated or (paper_value(table, scale, run.kind, what) if same else None)


def _paper_scale(run: RunRecord) -> str | None:
    """The paper's scale that a run repeats in all but the size of its variant, or None."""
    if run.midtrained:
        return None
    for scale in SCALES:
        config, attention = shipped(scale), run.config.model.attention
        entry = config.variants.get(run.kind)
        if entry and attention.form == entry.form and _shape(run.config) == _shape(config):
            return scale
    return None


@cache
def shipped(scale: str) -> RunConfig:
    """A scale's configuration as it is shipped; `variant` gives it another variant of attention."""
    return load_config(scale)


def of_paper(scale: str, kind: str) -> RunConfig:
    """A scale's configuration with the paper's variant of a kind, which is named as the kind."""
    return shipped(scale).variant(kind)


def _shape(config: RunConfig) -> tuple:
    model, train = config.model, config.train
    return (
        model.layers, model.width, model.heads, model.head_width, model.vocabulary,
        train.seq_len, train.global_batch_size, training_tokens(config),
        config.data.hub and config.data.hub.repo,
    )  # fmt: skip
