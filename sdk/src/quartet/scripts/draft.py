"""What a script asks for while it is translated: its table so far, and which argument each key is from.

1. A refusal of the table is said by the names that the script knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from quartet.config.load import validate
from quartet.config.model import Config, ConfigError
from quartet.config.refusals import together
from quartet.run.dialect import lay_over
from quartet.scripts.argument_list import NOTHING, ArgumentList

C = TypeVar("C", bound=Config)
Table = dict[str, Any]


@dataclass
class Draft:
    """The table so far. `names` says of each key which argument it is from."""

    args: ArgumentList
    table: Table = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, name: str) -> None:
        """Set a dotted key, from the argument of that name."""
        *parents, last = key.split(".")
        table = self.table
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = value
        self.names[key] = name

    def take(self, name: str, key: str) -> None:
        """An argument that is a key as it is."""
        self.put(key, getattr(self.args, name), name)

    def count(self, name: str, least: int = 1) -> int:
        """An argument that is computed with. Raises ConfigError."""
        value = getattr(self.args, name)
        if type(value) is not int or value < least:
            raise ConfigError(f"args.{name} = {value!r} is refused: should be a whole number from {least}")
        return value

    def chosen(self, name: str, choices: Sequence[str], instead: Mapping[str, str] = NOTHING) -> str:
        """An argument that is one of some words; `instead`: of others, what to write in their place. Raises
        ConfigError."""
        value = getattr(self.args, name)
        word = value.value if isinstance(value, Enum) else value
        if word not in choices:
            also = f"; or {instead[word]}" if isinstance(word, str) and word in instead else ""
            raise ConfigError(
                f"args.{name} = {word!r} is refused: should be one of {', '.join(choices)}{also}"
            )
        return str(word)


def validated(draft: Draft, model: type[C], table: Table) -> C:
    """The table with overrides laid over it. Raises ConfigError by the names of arguments."""
    _check_keys(draft.args.overrides)
    lay_over(table, draft.args.overrides)
    try:
        return validate(model, table)
    except ConfigError as error:
        raise together(_named(draft, one) for one in error.each) from None


def _check_keys(overrides: Mapping[Any, Any]) -> None:
    """Raises ConfigError."""
    for key, value in overrides.items():
        if not isinstance(key, str):
            raise ConfigError(f"args.overrides: {key!r} is refused: should be the name of a key, as text")
        if isinstance(value, Mapping):
            _check_keys(value)


def _named(draft: Draft, error: ConfigError) -> ConfigError:
    """A refusal of the table, by the names that the script knows."""
    sentence = _by_argument(draft, error)
    return ConfigError(sentence, key=error.key, value=error.value, remedy=error.remedy)


def _by_argument(draft: Draft, error: ConfigError) -> str:
    if _is_in(draft.args.overrides, error.key):
        return str(error)
    name = draft.names.get(error.key)
    if name is None:
        # It is about several keys together, of which the remedy names some.
        words = set(re.findall(r"[\w.]*\w", error.remedy))
        names = draft.names.items()
        meant = {one: key for key, one in names if not words.isdisjoint((key, key.rpartition(".")[2]))}
        said = ", ".join(f"{key} is args.{one}" for one, key in meant.items())
        return f"{error.remedy} ({said})" if said else str(error)
    if error.value == repr(getattr(draft.args, name, None)):
        return str(error).replace(error.key, f"args.{name}", 1)
    return f"args.{name}: {error}"


def _is_in(overrides: Mapping[str, Any], key: str) -> bool:
    """Whether the script itself wrote this dotted key, and no table."""
    first, _, rest = key.partition(".")
    below = overrides.get(first)
    if isinstance(below, Mapping) and rest:
        return _is_in(below, rest)
    return first in overrides and not rest and not isinstance(below, Mapping)
