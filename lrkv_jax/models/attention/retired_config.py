"""Retired variants, whose runs are kept: the settings that reports need, and no layer.

D model width  H heads  G residuals  K head width  R residual rank  C latent width
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from lrkv_jax.config.attention import ModelShape
from lrkv_jax.config.frozen import semantics
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.attention.lrkv_config import LRKV
from lrkv_jax.models.attention.mla_config import MLA


def _no_layer(label: str) -> LrkvError:
    return LrkvError(f"{label} was given up, and only its results can be read: use lrkv or mla")


class TiedLRKV(LRKV):
    """LRKV whose values read what its keys read: x W + r_h B_h, with one W and one r_h for both."""

    name: ClassVar[str] = "lrkv_tied"
    styles: ClassVar = {}

    @property
    def label(self) -> str:
        """As its results call it."""
        published = self.rope == "full"
        return f"LRKV-{self.sized}{' ' if published else f' rope {self.rope}, '}tied"

    @classmethod
    def layer_class(cls) -> Any:
        """Raise `LrkvError`: there is none."""
        raise _no_layer("tied LRKV")

    def kv_parameters(self, model: ModelShape) -> int:
        D, K, G, R = model.width, model.head_width, self.key_heads(model), self.rank
        return D * (K + G * R) + 2 * G * R * K

    def cache_values(self, model: ModelShape) -> int:
        return model.head_width + self.key_heads(model) * self.rank

    def cache_padding_values(self, model: ModelShape) -> int:
        return super().cache_padding_values(model) // 2

    def int8_rows(self, model: ModelShape) -> tuple[tuple[int, int], ...]:
        return super().int8_rows(model)[:1]


class LatentMLA(MLA):
    """MLA whose latent itself is rotated, in C dimensions."""

    name: ClassVar[str] = "mla_latent"
    styles: ClassVar = {}
    rope: Literal["latent"] = semantics("The latent in its C coordinates.", "latent")  # type: ignore

    @property
    def label(self) -> str:
        """As its results call it."""
        return f"MLA-{self.kv_lora_rank} rope latent"

    @classmethod
    def layer_class(cls) -> Any:
        """Raise `LrkvError`: there is none."""
        raise _no_layer("MLA in rope: latent")

    def logit_width(self, model: ModelShape) -> int:
        return self.kv_lora_rank + self.rank
