"""What the paper prints, as data; a value that does not hold has a verdict that says why.

The values are those of arXiv 2601.11471's source, in `printed.yaml`; the verdicts beside them were
recomputed, and the tests recompute them again.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lrkv_jax.config import RunConfig, load_config
from lrkv_jax.lab.report.comparison import RunRecord
from lrkv_jax.models.accounting.counts import training_tokens

# The shipped configurations of the paper's scales, with the paper's names for them.
SCALES = {"128m": "128M", "512m_8k": "512M", "1.2b": "1.2B", "2.5b": "2.5B", "6.3b": "6.3B"}

KINDS = ("mha", "gqa", "mqa", "mla", "lrkv")  # the variants that the paper compares, in its order


@dataclass(frozen=True)
class Printed:
    """A printed value, its text to the printed digit, and the verdict where it does not hold."""

    value: float | None  # None if it is not a number, as 18-25
    text: str
    verdict: str = ""


def printed(*path: str) -> Printed | None:
    """The value at a place of `printed.yaml`, as in ("table01", "ce", "128m", "lrkv").

    None where the paper prints nothing. A verdict stands for its place and all below it.
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
    return Printed(value, text, verdict(*path))


def printed_table(name: str) -> dict[str, Any]:
    """All that is printed of one artefact, as it stands in `printed.yaml`."""
    return _data()[name]


def verdict(*path: str) -> str:
    """What is wrong with the value at a place, or with a place above it; "" if nothing."""
    verdicts = _data()["verdicts"]
    places = ["/".join(path[:depth]) for depth in range(len(path), 0, -1)]
    return next((verdicts[place] for place in places if place in verdicts), "")


@cache
def _data() -> dict[str, Any]:
    text = Path(__file__).with_name("printed.yaml").read_text(encoding="utf-8")
    # As text: 2.530 must stay 2.530.
    return yaml.load(text, yaml.BaseLoader)


def paper_scale(run: RunRecord, *, any_size: bool = False) -> str | None:
    """The paper's scale that a run repeats in all that its printed values depend on, or None.

    Compared are the model's shape with the variant's size, context, batch, number of tokens and
    their source, against the scale's shipped configuration. With `any_size` the variant's size may
    be another, as in an ablation, whose configuration may have another name too. A run of a kind
    that the paper does not have repeats nothing.
    """
    if run.midtrained:
        return None
    for scale in SCALES:
        same_scale, ours = shipped(scale), run.config.model.attention
        entry = same_scale.variants.get(run.kind)
        same = entry is not None and (ours == entry or (any_size and ours.form == entry.form))
        if same and _shape(run.config) == _shape(same_scale):
            return scale
    return None


@cache
def shipped(scale: str) -> RunConfig:
    """A scale's own configuration; `variant` gives it another line of attention."""
    return load_config(scale)


def of_paper(scale: str, kind: str) -> RunConfig:
    """A scale's configuration with the paper's variant of a kind, which is named as the kind."""
    return shipped(scale).variant(kind)


def _shape(config: RunConfig) -> tuple:
    model, train = config.model, config.train
    return (
        model.layers, model.width, model.heads, model.head_width, model.vocabulary,
        train.context, train.batch, training_tokens(config),
        config.data.hub and config.data.hub.repo,
    )  # fmt: skip
