"""Kinds of values in a run's configuration.

Strict: TOML has numbers, so "8" and true are mistakes, not numbers. Counts travel as uint32.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

Count = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
PositiveCount = Annotated[int, Field(ge=1, lt=2**32, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
Decay = Annotated[float, Field(ge=0, lt=1, strict=True)]
Penalty = Annotated[float, Field(ge=-2, le=2, strict=True)]
Text = Annotated[str, Field(min_length=1)]
Table = Annotated[dict[str, Any], Field(default_factory=dict)]
