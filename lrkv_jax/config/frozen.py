"""The base of every configuration object: frozen, strict, no unknown keys."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Frozen(BaseModel):
    """Immutable, hashable settings; a misspelt key or a wrong type is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
