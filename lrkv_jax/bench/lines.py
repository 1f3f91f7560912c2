"""The lines of a scale that a benchmark compares: its variants, LRKV once for each rope mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lrkv_jax.config import RunConfig, load_config

ALIASES = {"36x2304": "2.5b", "24x1536": "1.2b"}
VARIANTS = ("mha", "gqa", "mqa", "mla", "lrkv")
ROPES = ("full", "shared", "latent")


class Line(NamedTuple):
    """One variant of a scale; `rope` is LRKV's mode, None for the others."""

    variant: str
    rope: str | None
    config: RunConfig

    @property
    def name(self) -> str:
        return name_of(self.variant, self.rope)


def name_of(variant: str, rope: str | None) -> str:
    """mha, lrkv full."""
    return f"{variant} {rope}" if rope else variant


def lines_of(
    scale: str,
    variants: Sequence[str],
    ropes: Sequence[str],
    *,
    depth: int | None = None,
    overrides: Sequence[str] = (),
) -> list[Line]:
    """Each line of a scale that was asked for, with `overrides`, cut to `depth` layers if given.

    Raises `LrkvError` as `load_config` does.
    """
    found = []
    for variant in variants:
        config = load_config(ALIASES.get(scale, scale), [f"attention={variant}", *overrides])
        model = config.model
        if depth is not None:
            # As many layers of the scan unrolled as divide the fewer ones.
            unroll = math.gcd(model.unroll, depth)
            model = model.model_copy(update={"layers": depth, "unroll": unroll})
        for rope in ropes if variant == "lrkv" else (None,):
            if rope is not None:
                entry = model.attention.model_copy(update={"rope": rope})
                model = model.model_copy(update={"attention": entry})
            found.append(Line(variant, rope, config.model_copy(update={"model": model})))
    return found
