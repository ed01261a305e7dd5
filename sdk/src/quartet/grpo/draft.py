"""A run while it is translated: its table so far, and which argument each of its keys is from.

A refusal of the run is said by the names that the script knows.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from quartet.config.load import validate
from quartet.config.model import Config, ConfigError
from quartet.config.refusals import together
from quartet.grpo.argument_list import ArgumentList
from quartet.run.config import RunConfig
from quartet.run.dialect import give_way, lay_over
from quartet.run.presets import PRESETS

C = TypeVar("C", bound=Config)
Table = dict[str, Any]


@dataclass
class Draft:
    """The run so far. `names` says of each key which argument it is from."""

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

    def chosen(self, name: str, choices: Sequence[str]) -> str:
        """An argument that is one of some words. Raises ConfigError."""
        value = getattr(self.args, name)
        word = value.value if isinstance(value, Enum) else value
        if word not in choices:
            is_preset = isinstance(word, str) and word in PRESETS
            instead = f'; or give overrides = {{"algorithm": {{"preset": "{word}"}}}} in its place'
            said = f"should be one of {', '.join(choices)}{instead if is_preset else ''}"
            raise ConfigError(f"args.{name} = {word!r} is refused: {said}")
        return str(word)


def checked(draft: Draft) -> RunConfig:
    """The run, with overrides laid over it. Raises ConfigError by the names of arguments."""
    overrides = draft.args.overrides
    for key, instead in (("model", "model"), ("env", "env")):
        if key in overrides:
            raise ConfigError(f"args.overrides: {key!r} is refused: give GRPOTrainer another {instead}")
    table = copy.deepcopy(draft.table)
    _give_way(table["algorithm"], overrides.get("algorithm"))
    return validated(draft, RunConfig, table)


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


def _give_way(algorithm: Table, said: Any) -> None:
    """A preset among the overrides, or another loss, is that alone, without what arguments say of theirs."""
    preset, loss = (said.get("preset"), said.get("loss")) if isinstance(said, Mapping) else (None, None)
    if preset is None and loss in (None, algorithm["loss"]):
        return
    give_way(algorithm, said)
    values = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    if {**algorithm, **values, **said}.get("aggregation") != "constant":
        algorithm.pop("constant_tokens", None)


def _named(draft: Draft, error: ConfigError) -> ConfigError:
    """A refusal of a run, by the names that the script knows."""
    sentence = _by_argument(draft, error)
    return ConfigError(sentence, key=error.key, value=error.value, remedy=error.remedy)


def _by_argument(draft: Draft, error: ConfigError) -> str:
    if _is_in(draft.args.overrides, error.key):
        return str(error)
    name = draft.names.get(error.key)
    if name is None:
        # It is about several keys together, of which the remedy names some.
        words = set(re.findall(r"\w+", error.remedy))
        meant = {one: key for key, one in draft.names.items() if key.rpartition(".")[2] in words}
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
