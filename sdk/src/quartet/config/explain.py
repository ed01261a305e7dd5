"""Turns a pydantic error into sentences: key, value, where it was set, what would be right."""

from __future__ import annotations

import difflib
from typing import Any

import pydantic

from quartet.config.keys import annotation_at, is_table, known_keys, model_at
from quartet.config.model import Config, ConfigError

#: Of a known key to an unknown one, from which on it is taken for what was meant (difflib's ratio).
LIKENESS = 0.7
#: Letters of a key's beginning that may stand for it.
MIN_BEGUN = 3
#: Of the things that are wrong.
MAX_TOLD = 8

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
    "tuple_type": 'a list, such as ["a", "b"]',
    "list_type": 'a list, such as ["a", "b"]',
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "path_type": "a path in quotes",
}


def explain(
    model: type[pydantic.BaseModel], error: pydantic.ValidationError, origins: dict[tuple[str, ...], str]
) -> ConfigError:
    """A sentence about each thing that is wrong, on a line of its own; with the parts of the first."""
    problems = error.errors(include_url=False)
    if any(one["type"] == "extra_forbidden" for one in problems):
        # A misspelt key often explains a missing one.
        problems = [one for one in problems if one["type"] != "missing"]
        problems.sort(key=lambda one: one["type"] != "extra_forbidden")
    first, *others = (_refusal(model, dict(problem), origins) for problem in problems[:MAX_TOLD])
    lines = [str(first), *(f"  also: {other}" for other in others)]
    if len(problems) > MAX_TOLD:
        lines.append(f"  and {len(problems) - MAX_TOLD} more")
    return ConfigError("\n".join(lines), key=first.key, value=first.value, remedy=first.remedy)


def _refusal(
    model: type[pydantic.BaseModel], problem: dict[str, Any], origins: dict[tuple[str, ...], str]
) -> ConfigError:
    loc = _without_union_tags(model, problem["loc"])
    key = ".".join(str(part) for part in loc)
    where = _origin(loc, origins)
    value = _shown(problem["input"])
    match problem["type"]:
        case "extra_forbidden":
            remedy = _nearest(model, loc)
            return ConfigError(f"unknown key {key!r}{where}; {remedy}", key=key, value=value, remedy=remedy)
        case "missing":
            remedy = f"set it in a file or with '--{key} VALUE'"
            return ConfigError(f"required key {key!r} is not set; {remedy}", key=key, remedy=remedy)
    remedy = _remedy(problem)
    table = model_at(model, loc)
    if problem["type"] in ("model_type", "model_attributes_type") and table is not None:
        remedy = f"write a table [{key}], or '--{key}.KEY VALUE', of {', '.join(table.model_fields)}"
    if isinstance(problem["input"], dict) and _is_value(model, loc):
        theirs = model.AS_TABLES.get(key) if issubclass(model, Config) else None
        remedy = f"it is no table here; {theirs}" if theirs else f"{remedy}, not a table"
    if not key:
        return ConfigError(remedy + where, remedy=remedy)
    return ConfigError(f"{key} = {value}{where} is refused: {remedy}", key=key, value=value, remedy=remedy)


def _remedy(problem: dict[str, Any]) -> str:
    expected = _EXPECTED.get(problem["type"])
    if expected is not None:
        return f"should be {expected}"
    text = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return text[:1].lower() + text[1:]


def _is_value(model: type[pydantic.BaseModel], loc: tuple[Any, ...]) -> bool:
    """Whether the key at a location is known to have no keys of its own."""
    path = tuple(part for part in loc if isinstance(part, str))
    annotation = annotation_at(model, path)
    return annotation is not None and model_at(model, path) is None and not is_table(annotation)


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
    names = tuple(str(part).replace("-", "_") for part in loc)
    for end in range(len(names), 0, -1):
        origin = origins.get(names[:end])
        if origin is not None:
            return "" if origin.startswith("--") else f" (in {origin})"
    return ""


def _nearest(model: type[pydantic.BaseModel], loc: tuple[Any, ...]) -> str:
    named = ".".join(str(part).replace("-", "_") for part in loc if not isinstance(part, int))
    if issubclass(model, Config) and named in model.OTHER_NAMES:
        return model.OTHER_NAMES[named]
    owner = model_at(model, loc[:-1])
    wanted = str(loc[-1]).replace("-", "_")
    siblings = list(owner.model_fields) if owner is not None else []
    prefix = "".join(f"{part}." for part in loc[:-1])
    everywhere = known_keys(model)
    elsewhere = [key for key in everywhere if key.rpartition(".")[2] == wanted]
    close = difflib.get_close_matches(wanted, siblings, n=1, cutoff=LIKENESS) or _begun(wanted, siblings)
    if close and not elsewhere:
        return f"did you mean {prefix + close[0]!r}?"
    if owner is not None and issubclass(owner, Config) and owner.OF_UNKNOWN_KEYS:
        if wanted in model.model_fields:
            return f"{wanted!r} belongs above the first table of the file; {owner.OF_UNKNOWN_KEYS}"
        return f"{owner.OF_UNKNOWN_KEYS}; known keys here: {', '.join(siblings)}"
    # Those beside it were compared by their names alone; with the table's, all of them look alike.
    far = [key for key in everywhere if owner is None or key.rpartition(".")[0] + "." != prefix]
    dotted = ".".join(str(part) for part in loc)
    elsewhere = elsewhere or difflib.get_close_matches(dotted, far, n=1, cutoff=LIKENESS)
    if elsewhere:
        return f"did you mean {elsewhere[0]!r}?"
    return f"known keys here: {', '.join(siblings)}"


def _begun(wanted: str, siblings: list[str]) -> list[str]:
    """The one key that begins so: "temp" for temperature."""
    longer = [one for one in siblings if one.startswith(wanted) and len(wanted) >= MIN_BEGUN]
    return longer if len(longer) == 1 else []


def _shown(value: Any) -> str:
    text = "true" if value is True else "false" if value is False else repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
