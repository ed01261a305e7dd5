"""How the border refuses: which field, which value, what to do instead."""

from __future__ import annotations

from typing import Any

import pydantic
from quartet.errors import QuartetError


def given(message: Any, *fields: str) -> dict[str, Any]:
    """The optional fields that were set, so that the domain's defaults hold for the others."""
    return {field: getattr(message, field) for field in fields if message.HasField(field)}


def first(error: pydantic.ValidationError, within: str = "") -> tuple[str, Any, str]:
    """The first problem as (key, value, why); `within` is the field that holds what was refused."""
    problem = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in (within, *problem["loc"]) if part != "") or "spec"
    value = problem["input"]
    shown = value if isinstance(value, (int, float, str)) else None
    return key, shown, problem["msg"].removeprefix("Value error, ")


def config(key: str, value: Any, why: str) -> QuartetError:
    """What defines a run is refused."""
    return QuartetError(
        "INVALID_CONFIG", f"{_named(key, value)} is refused: {why}", key=key, value=value, remedy=why
    )


def request(field: str, value: Any, why: str) -> QuartetError:
    """What a call carries is refused."""
    return QuartetError(
        "INVALID_REQUEST", f"{_named(field, value)} is refused: {why}", field=field, value=value, remedy=why
    )


def _named(key: str, value: Any) -> str:
    return key if value is None else f"{key} = {value!r}"
