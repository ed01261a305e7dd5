"""Kinds of values in a run's configuration.

Strict: TOML has numbers, so "8" and true are mistakes, not numbers. Counts travel as uint32. No number is nan
or infinite, in tables of somebody else's keys neither: JSON has none, and would drop the key. It has no dates
either, which TOML has.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator
from typing import Annotated, Any

import pydantic
from pydantic import Field

from quartet.config.model import wrong

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


def _of_json(table: dict[str, Any], info: pydantic.ValidationInfo) -> dict[str, Any]:
    remedy = 'should be {0}; the text is "{1}" in a file, \'"{1}"\' on the command line'
    problems = [
        ("not_json", path, value, remedy.format(wanted, text)) for path, value, wanted, text in _others(table)
    ]
    if problems:
        raise wrong(str(info.field_name), *problems)
    return table


def _others(value: Any) -> Iterator[tuple[tuple[str, ...], Any, str, str]]:
    """Everything inside that JSON has not: its place, itself, what it should be, and it as text."""
    inner: Any = ()
    match value:
        case float() if not math.isfinite(value):
            yield (), value, "a finite number", str(value)
        case datetime.date() | datetime.time():  # as TOML reads them without quotes
            yield (), value, "text in quotes", value.isoformat()
        case dict():
            inner = value.items()
        case list() | tuple():
            inner = enumerate(value)
    for key, one in inner:
        for path, other, wanted, text in _others(one):
            yield (str(key), *path), other, wanted, text


def _of_a_file(table: dict[str, Any], info: pydantic.ValidationInfo) -> dict[str, Any]:
    remedy = "files have no null; leave it out, and its own default holds"
    if problems := [("not_toml", path, None, remedy) for path in nulls(table)]:
        raise wrong(str(info.field_name), *problems)
    return table


def nulls(value: Any) -> Iterator[tuple[str, ...]]:
    """The places of all inside."""
    if value is None:
        yield ()
    elif isinstance(value, dict | list | tuple):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from ((str(key), *path) for path in nulls(one))


def is_refused(value: Any) -> bool:
    """Whether a table of a file is refused for what is in a value."""
    return next(_others(value), None) is not None or next(nulls(value), None) is not None


#: Keys that somebody else reads.
JsonTable = Annotated[dict[str, Any], pydantic.AfterValidator(_of_json)]
#: The same, where none is an empty one.
Table = Annotated[JsonTable, Field(default_factory=dict)]
#: The same of what is written down as TOML: a null, as an option may have it in JSON, would be dropped.
FileTable = Annotated[Table, pydantic.AfterValidator(_of_a_file)]
