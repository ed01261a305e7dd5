"""What all specs are: frozen values without unknown keys, infinities or NaN. And what runs may be called."""

from __future__ import annotations

import re

import pydantic
from quartet.errors import QuartetError

#: Run and state names become folder names.
NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Value(pydantic.BaseModel):
    """A value that is compared and saved."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def check_name(field: str, name: str) -> None:
    """Refuse what cannot be a folder name. Errors: INVALID_REQUEST."""
    if not NAME_PATTERN.fullmatch(name) or set(name) == {"."}:
        raise QuartetError(
            "INVALID_REQUEST",
            f"{field} {name!r} is not 1-64 of [A-Za-z0-9_.-], or is dots alone",
            field=field,
            value=name,
            remedy="choose a name of letters, digits, '_', '.' and '-'",
        )
