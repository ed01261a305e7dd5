"""What keys a configuration model has, read from its annotations.

The ground for command-line overrides, for help and for suggestions.
"""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

import pydantic


def annotation_at(model: type[pydantic.BaseModel], path: tuple[str, ...]) -> Any:
    """The annotation of a dotted key, or None where the model has no such key (free tables included)."""
    annotation: Any = model
    for part in path:
        owner = model_in(annotation)
        if owner is None or part not in owner.model_fields:
            return None
        annotation = owner.model_fields[part].annotation
    return annotation


def model_at(model: type[pydantic.BaseModel], path: tuple[str | int, ...]) -> type[pydantic.BaseModel] | None:
    """The model that owns the keys below a path, looking through lists, optionals and tables of any names."""
    annotation: Any = model
    for part in path:
        if isinstance(part, int):
            continue
        owner = model_in(annotation)
        if owner is not None and part in owner.model_fields:
            annotation = owner.model_fields[part].annotation
        elif owner is None and (tables := _tables_in(annotation)) is not None:
            annotation = tables
        else:
            return None
    return model_in(annotation)


def known_keys(
    model: type[pydantic.BaseModel], prefix: str = ""
) -> dict[str, tuple[type[pydantic.BaseModel], str]]:
    """Every dotted key, with the model that has it and its name there."""
    keys: dict[str, tuple[type[pydantic.BaseModel], str]] = {}
    for name, info in model.model_fields.items():
        inner = model_in(info.annotation)
        keys |= {prefix + name: (model, name)} if inner is None else known_keys(inner, f"{prefix}{name}.")
    return keys


def is_flag(annotation: Any) -> bool:
    """Whether `--key` alone means true."""
    return bool in alternatives(annotation)


def is_table(annotation: Any) -> bool:
    """Whether the key has keys of its own."""
    kinds = [typing.get_origin(one) or one for one in alternatives(annotation)]
    return any(isinstance(one, type) and issubclass(one, (dict, pydantic.BaseModel)) for one in kinds)


def is_array(annotation: Any) -> bool:
    """Whether the key is a list."""
    return any(typing.get_origin(one) in (list, tuple) for one in alternatives(annotation))


def accepts_text(annotation: Any) -> bool:
    """Whether the key takes text and nothing that TOML would write otherwise."""
    kinds = [one for one in alternatives(annotation) if one is not type(None)]
    return bool(kinds) and all(one in (str, Path) or (isinstance(one, Choice) and one.text) for one in kinds)


class Choice:
    """A Literal's values."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values
        self.text = all(isinstance(value, str) for value in values)


def alternatives(annotation: Any) -> list[Any]:
    """The members of a union, optionals and annotations taken apart; Literals as one opaque member."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return alternatives(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [one for arg in typing.get_args(annotation) for one in alternatives(arg)]
    if origin is typing.Literal:
        return [Choice(typing.get_args(annotation))]
    return [annotation]


def _tables_in(annotation: Any) -> Any:
    """What a table of any names has under each of them."""
    tables = (one for one in alternatives(annotation) if typing.get_origin(one) is dict)
    return next((typing.get_args(one)[1] for one in tables), None)


def model_in(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The model that a key's value is, or those of its list; None where it has no keys of its own."""
    for one in alternatives(annotation):
        if isinstance(one, type) and issubclass(one, pydantic.BaseModel):
            return one
        if typing.get_origin(one) in (list, tuple):
            inner = model_in(typing.get_args(one)[0])
            if inner is not None:
                return inner
    return None
