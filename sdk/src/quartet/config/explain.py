"""Turns a pydantic error into sentences: key, value, where it was set, what would be right.

1. All that is wrong is told, but for what may be right once the rest is: a misspelt key often explains a
   missing one. What options say comes first, then keys at the top, then those of tables.
2. What could not be read at all may have had any key: then only what is wrong beside any other is told.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pydantic

from quartet.config.keys import annotation_at, is_table, known_keys, model_at
from quartet.config.model import ELSEWHERE, NOT_GIVEN, Config, ConfigError

#: Of a known key to an unknown one, from which on it is taken for what was meant (difflib's ratio).
LIKENESS = 0.7
#: Characters of a value that are quoted, and of a table or a list that is quoted at all.
MAX_VALUE, MAX_TABLE = 80, 40
#: Letters of a key's beginning that may stand for it.
MIN_BEGUN = 3

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


@dataclass(frozen=True)
class Source:
    """Where the values that were refused come from."""

    #: Of a key, the file or the option that set it.
    origins: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    #: Of a key that a file of another trainer became, where that file says it.
    translated: Mapping[tuple[str, ...], str] = field(default_factory=dict)
    #: Options of the command that are no keys, such as "--resume".
    flags: Collection[str] = ()
    #: Whether some argument was refused before, and what it said is not among the values.
    lacks_a_key: bool = False
    #: Whether that was a file.
    lacks_a_file: bool = False


def explain(
    model: type[pydantic.BaseModel], error: pydantic.ValidationError, source: Source
) -> list[ConfigError]:
    """A sentence about each thing that is wrong."""
    problems = error.errors(include_url=False)
    misnamed = [one for one in problems if one["type"] in _MISNAMED]
    others = [one for one in problems if one["type"] not in _MISNAMED]
    if misnamed or source.lacks_a_key:
        others = [one for one in others if one["type"] not in ("missing", NOT_GIVEN)]
    # What is wrong with an item is not counted as one.
    places = {tuple(one["loc"][:end]) for one in problems for end in range(len(one["loc"]))}
    others = [one for one in others if one["type"] != "too_short" or tuple(one["loc"]) not in places]
    if source.lacks_a_file:
        others = [one for one in others if one["type"] != "value_error"]
    told = sorted((*misnamed, *others), key=lambda one: _remoteness(one["loc"], source))
    each = (one for problem in told for one in _of_each_key(model, dict(problem), source))
    return [_refusal(model, one, source) for one in each]


def _remoteness(loc: tuple[Any, ...], source: Source) -> int:
    """How far a key is from what was typed."""
    if _origin(loc, source).startswith("--"):
        return 0
    return 1 if len(loc) <= 1 else 2


def _refusal(model: type[pydantic.BaseModel], problem: dict[str, Any], source: Source) -> ConfigError:
    loc = _without_union_tags(model, problem["loc"])
    key = ".".join(str(part) for part in loc)
    origin = _origin(loc, source)
    # An option is what was typed, but for one of another trainer's.
    theirs = source.translated.get(tuple(str(part).replace("-", "_") for part in loc))
    is_typed = origin.startswith("--") and origin != theirs
    where = f" (in {origin})" if origin and not is_typed else ""
    value = _shown(problem["input"])
    match problem["type"]:
        case "extra_forbidden":
            remedy = (
                _flag(model, loc, source)
                or (is_typed and _in_their_table(model, loc))
                or _unquoted(model, loc)
                or _nearest(model, loc)
            )
            return ConfigError(f"unknown key {key!r}{where}; {remedy}", key=key, value=value, remedy=remedy)
        case kind if kind == ELSEWHERE:
            outer, _, name = key.partition(".")
            remedy = str(problem["msg"])
            text = f"{name!r} is no key of [{outer}]{where}; {remedy}"
            if origin.startswith("--"):
                text = f"there is no option {origin!r}; {remedy}"
            return ConfigError(text, key=key, value=value, remedy=remedy)
        case kind if kind == NOT_GIVEN:
            return ConfigError(str(problem["msg"]), key=key, remedy=str(problem["msg"]))
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
        return ConfigError(remedy + _in_their_words(remedy, source), remedy=remedy)
    said = key if _is_long_table(problem["input"]) else f"{key} = {value}"
    return ConfigError(f"{said}{where} is refused: {remedy}", key=key, value=value, remedy=remedy)


def _remedy(problem: dict[str, Any]) -> str:
    expected = _EXPECTED.get(problem["type"])
    if expected is not None:
        return f"should be {expected}"
    text = str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    # pydantic's names of types, and its counts, are no words of a file's.
    text = re.sub(r"^(String|List|Tuple|Dictionary) should have", "should have", text)
    text = re.sub(r" after validation, not \d+$", "", text)
    text = text.replace("should have at least 1 character", "should not be empty")
    return text[:1].lower() + text[1:] + _near_choice(problem)


def _near_choice(problem: dict[str, Any]) -> str:
    """Of several words that a value may be, the one that is nearest to what was written."""
    if problem["type"] != "literal_error" or not isinstance(problem["input"], str):
        return ""
    choices = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
    close = difflib.get_close_matches(problem["input"].lower(), choices, n=1, cutoff=LIKENESS)
    return f"; did you mean {close[0]!r}?" if close else ""


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
        if is_tag and annotation_at(model, _names(tuple(kept))) is not None:
            continue
        kept.append(part)
        owner = model_at(model, tuple(kept))
    return tuple(kept)


_MISNAMED = ("extra_forbidden", ELSEWHERE)
_TAGS = {"str", "int", "float", "bool", "none", "path"}


def _origin(loc: tuple[Any, ...], source: Source) -> str:
    """The option that set a key or one in it, else the file that set it; else an option that set a key beside
    it, which may be another name of it, or the file that set its table."""
    names = tuple(str(part).replace("-", "_") for part in loc)
    typed = {path: one for path, one in source.origins.items() if one.startswith("--")}
    for end in range(len(names), 0, -1):
        place = names[:end]
        inside = (one for path, one in typed.items() if path[:end] == place and end >= len(names) - 1)
        if origin := next(inside, "") or source.origins.get(place, ""):
            return origin
    return ""


def _in_their_words(sentence: str, source: Source) -> str:
    """Where a file of another trainer says what the sentence names by keys of a run."""
    said = []
    for name in dict.fromkeys(re.findall(r"[a-z][a-z0-9_.]*[a-z0-9]", sentence)):
        path = tuple(name.split("."))
        place = source.translated.get(path)
        if place is not None and place == source.origins.get(path) and not place.startswith(f"{name} "):
            said.append(f"{name} is {place}")
    return f" (here {', '.join(said)})" if said else ""


def _of_each_key(
    model: type[pydantic.BaseModel], problem: dict[str, Any], source: Source
) -> Iterator[dict[str, Any]]:
    """Of a table of another trainer's, each key that options give in it and that is known by its name, and
    the table itself for the others; every other problem as it is."""
    loc, value = problem["loc"], problem["input"]
    is_theirs = issubclass(model, Config) and loc and loc[-1] in model.TABLES_OF_OTHERS
    if not is_theirs or problem["type"] != "extra_forbidden" or not _origin(loc, source).startswith("--"):
        yield problem
        return
    keys = dict(_keys_in(loc, value))
    known = [key for key in keys if _in_their_table(model, key)]
    yield from (problem | {"loc": key, "input": keys[key]} for key in known)
    if len(known) < len(keys):
        yield problem


def _keys_in(loc: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _keys_in((*loc, name), inner)
    else:
        yield loc, value


def _in_their_table(model: type[pydantic.BaseModel], loc: tuple[Any, ...]) -> str:
    """What a key in a table of another trainer's is here, where that is known of its name, or of it and the
    tables that it is in; else empty."""
    names = _names(loc)
    if len(names) < 2 or not issubclass(model, Config) or not model.TABLES_OF_OTHERS & {*names[:-1]}:
        return ""
    for begin in range(len(names)):
        if remedy := model.OTHER_NAMES.get(".".join(names[begin:])):
            return remedy
    same = (key for key in known_keys(model) if key.rpartition(".")[2] == names[-1])
    return f"did you mean {meant!r}?" if (meant := next(same, "")) else ""


def _flag(model: type[pydantic.BaseModel], loc: tuple[Any, ...], source: Source) -> str:
    """What an option that is no key was meant as; empty where a key is as near."""
    name = str(loc[0])
    if len(loc) > 1 or not _origin(loc, source).startswith("--"):
        return ""
    return near_flag(model, name, source.flags)


def near_flag(model: type[pydantic.BaseModel], name: str, flags: Collection[str]) -> str:
    """The flag that an option was meant as, in words; empty where there is none, or a key is nearer. One that
    has a table's name, too, is the flag: a table is never given without a key."""
    if issubclass(model, Config) and name.replace("-", "_") in model.OTHER_NAMES:
        return ""
    names = {flag.removeprefix("--").replace("-", "_"): flag for flag in flags}
    both = [*model.model_fields, *names]
    close = difflib.get_close_matches(name.replace("-", "_"), both, n=1, cutoff=LIKENESS)
    if not close or close[0] not in names:
        return ""
    is_key = close[0] in model.model_fields and not is_table(annotation_at(model, (close[0],)))
    return "" if is_key else f"did you mean {names[close[0]]!r}?"


def _unquoted(model: type[pydantic.BaseModel], loc: tuple[Any, ...]) -> str:
    """How a key is written whose dots a file has in quotes; empty where it would be none without them."""
    *outer, name = str(loc[-1]).split(".")
    table = _names((*loc[:-1], *outer))
    is_free = is_table(annotation_at(model, table)) and model_at(model, table) is None
    if not outer or not (is_free or annotation_at(model, (*table, *_names((name,))))):
        return ""
    # A further header cannot say in which of a list's tables it is.
    is_in_list = any(isinstance(part, int) for part in loc)
    inside = "" if is_in_list else f", or {name} in the table [{'.'.join(table)}]"
    return f"a key in quotes is one word, with its dots: write {loc[-1]} without quotes{inside}"


def near_key(model: type[pydantic.BaseModel], path: tuple[str, ...]) -> str:
    """The key that an unknown one was meant as, in words; empty where none is near."""
    remedy = _nearest(model, path)
    return remedy if remedy.startswith("did you mean") else ""


def _nearest(model: type[pydantic.BaseModel], loc: tuple[Any, ...]) -> str:
    named = ".".join(_names(loc))
    if issubclass(model, Config) and named in model.OTHER_NAMES:
        return _of_the_item(model.OTHER_NAMES[named], loc)
    owner = model_at(model, loc[:-1])
    wanted = str(loc[-1]).replace("-", "_")
    siblings = list(owner.model_fields) if owner is not None else []
    if owner is not None and issubclass(owner, Config):
        siblings += owner.ALSO_KEYS
    prefix = "".join(f"{part}." for part in loc[:-1])
    everywhere = known_keys(model)
    elsewhere = [key for key in everywhere if key.rpartition(".")[2] == wanted]
    close = difflib.get_close_matches(wanted, siblings, n=1, cutoff=LIKENESS) or _begun(wanted, siblings)
    if close and not elsewhere:
        return f"did you mean {prefix + close[0]!r}?"
    said = owner.OF_UNKNOWN_KEYS if owner is not None and issubclass(owner, Config) else ""
    if said and wanted in model.model_fields:
        return f"{wanted!r} belongs above the first table of the file; {said}"
    below = ".".join(_names(loc[:-1])) + "."
    if inside := next((key for key in elsewhere if key.startswith(below)), ""):
        return _of_the_item(f"did you mean {inside!r}?", loc)
    if said:
        return f"{said}; known keys here: {', '.join(siblings)}"
    # Those beside it were compared by their names alone; with the table's, all of them look alike.
    far = [key for key in everywhere if owner is None or key.rpartition(".")[0] + "." != prefix]
    if len(loc) > 1:  # so do those of tables that end like it
        ends = {key: key.rpartition(".")[2] for key in far}
        far = [key for key in far if difflib.get_close_matches(wanted, [ends[key]], cutoff=LIKENESS)]
    dotted = ".".join(str(part) for part in loc)
    elsewhere = elsewhere or difflib.get_close_matches(dotted, far, n=1, cutoff=LIKENESS)
    if elsewhere:
        return f"did you mean {elsewhere[0]!r}?"
    return f"known keys here: {', '.join(siblings)}"


def _names(loc: tuple[Any, ...]) -> tuple[str, ...]:
    """Without places in lists."""
    return tuple(str(part).replace("-", "_") for part in loc if not isinstance(part, int))


def _of_the_item(remedy: str, loc: tuple[Any, ...]) -> str:
    """The key that it names beside the one at a location, in the same item of a list."""
    table, item = (".".join(map(str, path)) for path in (_names(loc[:-1]), loc[:-1]))
    return remedy.replace(f"'{table}.", f"'{item}.") if table else remedy


def _begun(wanted: str, siblings: list[str]) -> list[str]:
    """The shortest key that begins so: "temp" for temperature."""
    longer = [one for one in siblings if one.startswith(wanted) and len(wanted) >= MIN_BEGUN]
    return sorted(longer, key=len)[:1]


def _is_long_table(value: Any) -> bool:
    """Whether it is a table, or a list, that says less in a sentence than the key that names it."""
    is_long = isinstance(value, (dict, list, tuple)) and len(repr(value)) > MAX_TABLE
    return is_long or isinstance(value, pydantic.BaseModel)


def _shown(value: Any) -> str:
    if _is_long_table(value):
        return ""
    text = "true" if value is True else "false" if value is False else repr(value)
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + "…"
