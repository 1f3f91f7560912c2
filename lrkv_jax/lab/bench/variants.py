"""The variants of a scale that a benchmark compares, each in the chosen modes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from lrkv_jax.config import RunConfig, load_config
from lrkv_jax.config.attention import variants as all_variants
from lrkv_jax.errors import LrkvError, nearest

ALIASES = {"36x2304": "2.5b", "24x1536": "1.2b"}
OWN = "own"  # in place of modes: none but what the scale has


class ScaleVariant(NamedTuple):
    """One variant of a scale, in the mode `rope`; None for a variant that is taken as it is."""

    variant: str
    config: RunConfig
    rope: str | None

    @property
    def name(self) -> str:
        """Variant and mode, as in lrkv full."""
        return name_of(self.variant, self.rope)

    @property
    def kind(self) -> str:
        """Which kind of attention it is: a table and a look belong to it."""
        return self.config.model.attention.name

    def computing_in(self, dtype: str) -> ScaleVariant:
        """The same in another number format."""
        model = self.config.model.model_copy(update={"dtype": dtype})
        return self._replace(config=self.config.model_copy(update={"model": model}))


def name_of(variant: str, rope: str | None) -> str:
    """mha, lrkv full."""
    return f"{variant} {rope}" if rope else variant


def variants_of(
    scale: str,
    variants: Sequence[str] | None,
    ropes: Sequence[str] | None,
    *,
    depth: int | None = None,
    overrides: Sequence[str] = (),
) -> list[ScaleVariant]:
    """The chosen variants of a scale, with `overrides`, cut to `depth` layers if given.

    None asks for every variant of the scale, and for every mode; `lrkv` in its mode latent then
    stands for `lrkv_latent`. `OWN` takes each variant as the scale has it. Raises `LrkvError` for
    modes that no variant has, and as `load_config` does.
    """
    scale = ALIASES.get(scale, scale)
    if variants is None:
        listed = load_config(scale, overrides).variants
        variants = tuple(listed)
        if OWN not in (ropes or ()):
            # lrkv_latent beside lrkv, whose mode latent is taken anyway.
            named = {f"{v}_{mode}" for v, one in listed.items() for mode in one.compared_modes()}
            variants = tuple(variant for variant in listed if variant not in named)
    found = []
    for variant in variants:
        config = load_config(scale, [f"attention={variant}", *overrides])
        model = config.model
        if depth is not None:
            # As many layers of the scan unrolled as divide the fewer ones.
            unroll = math.gcd(model.unroll, depth)
            model = model.model_copy(update={"layers": depth, "unroll": unroll})
        modes = [m for m in model.attention.compared_modes() if ropes is None or m in ropes]
        for mode in modes or [None]:
            entry = model.attention.in_mode(mode) if mode else model.attention
            changed = model.model_copy(update={"attention": entry})
            found.append(ScaleVariant(variant, config.model_copy(update={"model": changed}), mode))
    known = dict.fromkeys(
        mode for entry in all_variants().values() for mode in entry.compared_modes()
    )
    known[OWN] = None
    for rope in ropes or ():
        if rope not in known:
            raise LrkvError(f"ropes: {rope} is unknown{nearest(rope, known)}")
    return found
