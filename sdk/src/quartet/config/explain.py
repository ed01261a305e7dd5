"""Turns a pydantic error into one sentence: key, value, where it was set, what would be right."""

from __future__ import annotations

import difflib
from typing import Any

import pydantic

from quartet.config.keys import known_keys, model_at

# What is right, in words, for the error types whose pydantic text speaks of Python.
_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": 'text in quotes, such as "name"',
    "list_type": 'a list, such as ["a", "b"]',
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "path_type": "a path in quotes",
}


def explain(
    model: type[pydantic.BaseModel], error: pydantic.ValidationError, origins: dict[tuple[str, ...], str]
) -> str:
    """One sentence about the first thing that is wrong, and how many more there are."""
    problems = error.errors(include_url=False)
    # Unknown keys first: a misspelt key often explains a missing one.
    problems.sort(key=lambda one: one["type"] != "extra_forbidden")
    sentence = _sentence(model, dict(problems[0]), origins)
    more = len(problems) - 1
    return f"{sentence} (and {more} more)" if more else sentence


def _sentence(
    model: type[pydantic.BaseModel], problem: dict[str, Any], origins: dict[tuple[str, ...], str]
) -> str:
    loc = _without_union_tags(model, problem["loc"])
    key = ".".join(str(part) for part in loc)
    where = _origin(loc, origins)
    match problem["type"]:
        case "extra_forbidden":
            return f"unknown key {key!r}{where}; {_nearest(model, loc)}"
        case "missing":
            return f"required key {key!r} is not set; set it in a file or with '--{key} VALUE'"
    value = _shown(problem["input"])
    expected = _EXPECTED.get(problem["type"])
    if expected is None:
        text = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ")
        expected_text = text[:1].lower() + text[1:]
    else:
        expected_text = f"should be {expected}"
    if not key:
        return expected_text + where
    return f"{key} = {value}{where} is refused: {expected_text}"


def _without_union_tags(model: type[pydantic.BaseModel], loc: tuple[Any, ...]) -> tuple[Any, ...]:
    """Drop what pydantic adds to a location that the file does not have: names of union members."""
    kept: list[Any] = []
    owner: type[pydantic.BaseModel] | None = model
    for part in loc:
        is_tag = isinstance(part, str) and kept and owner is None and ("[" in part or part in _TAGS)
        if is_tag:
            continue
        kept.append(part)
        owner = model_at(model, tuple(kept))
    return tuple(kept)


_TAGS = {"str", "int", "float", "bool", "none", "path"}


def _origin(loc: tuple[Any, ...], origins: dict[tuple[str, ...], str]) -> str:
    names = tuple(str(part) for part in loc)
    for end in range(len(names), 0, -1):
        for path, origin in origins.items():
            if tuple(part.replace("-", "_") for part in path) == tuple(
                part.replace("-", "_") for part in names[:end]
            ):
                return "" if origin.startswith("--") else f" (in {origin})"
    return ""


def _nearest(model: type[pydantic.BaseModel], loc: tuple[Any, ...]) -> str:
    owner = model_at(model, loc[:-1])
    wanted = str(loc[-1]).replace("-", "_")
    siblings = list(owner.model_fields) if owner is not None else []
    prefix = "".join(f"{part}." for part in loc[:-1])
    close = difflib.get_close_matches(wanted, siblings, n=1, cutoff=0.6)
    if close:
        return f"did you mean {prefix + close[0]!r}?"
    everywhere = known_keys(model)
    elsewhere = [key for key in everywhere if key.rpartition(".")[2] == wanted]
    dotted = ".".join(str(part) for part in loc)
    elsewhere = elsewhere or difflib.get_close_matches(dotted, list(everywhere), n=1, cutoff=0.6)
    if elsewhere:
        return f"did you mean {elsewhere[0]!r}?"
    return f"known keys here: {', '.join(siblings)}"


def _shown(value: Any) -> str:
    text = "true" if value is True else "false" if value is False else repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
