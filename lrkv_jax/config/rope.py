"""Settings of RoPE scaling: frequencies for longer sequences than they were trained on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lrkv_jax.config.frozen import Group, Positive, PositiveFloat, semantics
from lrkv_jax.errors import LrkvError

# The settings that each kind has in addition to `factor`; the first is required.
OWN = {
    "linear": (),
    "llama3": ("original_context", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "original_context", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale",
        "mscale_all_dim",
    ),
}  # fmt: skip


class RopeScaling(Group):
    """Hugging Face's `rope_parameters`, with the names that they have there.

    `original_context` is their `original_max_position_embeddings`. `lrkv_jax.models.rope` has the
    equations.
    """

    kind: Literal["linear", "llama3", "yarn"] = semantics(
        "linear divides each frequency by factor; llama3 and yarn keep the high ones, divide the "
        "low ones, and blend between."
    )
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = semantics(
        "What frequencies are divided by: how many times longer sequences become."
    )
    original_context: Positive | None = semantics(
        "(llama3, yarn) Tokens of the sequences that the frequencies were trained on.", None
    )
    low_freq_factor: PositiveFloat | None = semantics(
        "(llama3) Turns within original_context up to which a frequency is divided. Null: 1.", None
    )
    high_freq_factor: PositiveFloat | None = semantics(
        "(llama3) Turns within original_context from which a frequency is kept. Null: 4.", None
    )
    beta_fast: PositiveFloat | None = semantics(
        "(yarn) Turns within original_context from which a frequency is kept. Null: 32.", None
    )
    beta_slow: PositiveFloat | None = semantics(
        "(yarn) Turns within original_context up to which a frequency is divided. Null: 1.", None
    )
    truncate: bool | None = semantics(
        "(yarn) Round the pairs between which it blends outwards to whole ones. Null: true.", None
    )
    attention_factor: PositiveFloat | None = semantics(
        "(yarn) What queries and keys are multiplied by, so logits by its square. Null: it follows "
        "from mscale and mscale_all_dim, or is 0.1 · ln(factor) + 1.",
        None,
    )
    mscale: PositiveFloat | None = semantics(
        "(yarn) With mscale_all_dim, attention_factor is (0.1 · mscale · ln(factor) + 1) / "
        "(0.1 · mscale_all_dim · ln(factor) + 1).",
        None,
    )
    mscale_all_dim: PositiveFloat | None = semantics("(yarn) See mscale.", None)

    @model_validator(mode="after")
    def _belongs_together(self) -> RopeScaling:
        key, own = "model.rope_scaling", OWN[self.kind]
        if own and self.original_context is None:
            raise LrkvError(
                f"{key}.original_context is missing: give the tokens of the sequences that the "
                f"frequencies were trained on, which kind: {self.kind} asks for"
            )
        for name in type(self).model_fields:
            if name not in ("kind", "factor", *own) and getattr(self, name) is not None:
                kinds = " or ".join(kind for kind, names in OWN.items() if name in names)
                raise LrkvError(
                    f"{key}.{name} belongs to kind: {kinds}, and this is {self.kind}: leave it out"
                )
        ends = {
            "llama3": ("low_freq_factor", 1.0, "high_freq_factor", 4.0),
            "yarn": ("beta_slow", 1.0, "beta_fast", 32.0),
        }.get(self.kind)
        if ends:
            low, high = (getattr(self, name) or usual for name, usual in (ends[:2], ends[2:]))
            if low >= high:
                raise LrkvError(
                    f"{key}.{ends[0]} = {low:g} is not below {ends[2]} = {high:g}: frequencies "
                    "are divided below the one and kept above the other"
                )
        return self
