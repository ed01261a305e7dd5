"""Files of other trainers as runs: what their translations (vf_rl, prime_rl) have in common.

1. Of a file every key is translated, or left out and told with the reason, or refused in one sentence.
2. A translation says of every key of the run where the file says it, so that a refusal can name that.
3. Whatever a file says, a translation changes nothing in its tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

from quartet.config import ConfigError

Tables = dict[str, Any]
#: Of [algorithm], what belongs to a loss, and what a preset says, too.
OF_A_LOSS: Final = (
    *("loss", "clip_low", "clip_high", "delta", "tau_positive", "tau_negative", "kernel"),
    *("proximal", "correction", "custom", "custom_args"),
)
OF_A_PRESET: Final = (*OF_A_LOSS, "advantage", "aggregation", "zero_advantage_filtering")
Engine = Literal["embedded", "vllm"]


@dataclass(frozen=True)
class Translation:
    """A file of another trainer as a run."""

    #: Of a RunConfig.
    tables: Tables
    #: For each key of the tables, where the file says it.
    origins: Mapping[tuple[str, ...], str]
    #: What has no effect here, as "key = value (why)".
    without_effect: tuple[str, ...]
    run_name: str | None
    output_dir: str | None


class Untranslated(ConfigError):
    """What a file says that is refused. `run`: the rest, whose values may be wrong, too."""

    def __init__(self, error: ConfigError, run: Translation) -> None:
        each = error.each if len(error.each) > 1 else ()
        super().__init__(str(error), key=error.key, value=error.value, remedy=error.remedy, each=each)
        self.run = run


@dataclass
class RunDraft:
    """The run as it grows."""

    tables: Tables = field(default_factory=dict)
    origins: dict[tuple[str, ...], str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    names: dict[str, str | None] = field(default_factory=dict)

    def put(self, path: str, value: Any, source: str) -> None:
        """A key of the run, by its dotted name."""
        *tables, key = path.split(".")
        table = self.tables
        for name in tables:
            table = table.setdefault(name, {})
        table[key] = value
        self.origins[tuple(path.split("."))] = source

    def leave(self, lines: Iterable[str]) -> None:
        """What has no effect here, as `shown` says it."""
        self.unread.extend(lines)

    def finished(self) -> Translation:
        """As it stands."""
        names = (self.names.get("run_name"), self.names.get("output_dir"))
        return Translation(self.tables, self.origins, tuple(dict.fromkeys(self.unread)), *names)


def shown(key: str, value: Any, why: str) -> str:
    """What a person reads of a key that has no effect, and why."""
    return f"{_in_a_line(key)} = {json.dumps(value, default=str)} ({why})"


def refusal(key: str, value: Any, remedy: str) -> ConfigError:
    """Of a key, with the value as JSON."""
    text, key = json.dumps(value, default=str), _in_a_line(key)
    return ConfigError(f"{key} = {text} is refused: {remedy}", key=key, value=text, remedy=remedy)


def refuse(key: str, value: Any, remedy: str) -> NoReturn:
    """Raises ConfigError."""
    raise refusal(key, value, remedy)


def _in_a_line(key: str) -> str:
    """A quoted key of TOML may have line breaks in it."""
    return key if key.isprintable() else json.dumps(key)[1:-1]


def give_way(algorithm: Tables, said: Any) -> None:
    """A loss or a preset that is said in Quartet's own words, as [algorithm], is that alone: without keys of
    the one that it replaces."""
    if not isinstance(said, Mapping):
        return
    preset, loss = said.get("preset"), said.get("loss")
    for key in OF_A_PRESET if preset is not None else OF_A_LOSS if loss is not None else ():
        algorithm.pop(key, None)


def lay_over(into: Tables, table: Mapping[str, Any]) -> None:
    """Tables key by key, all else whole; `a-b` is laid over `a_b`."""
    for key, value in table.items():
        name = next((one for one in into if one.replace("-", "_") == key.replace("-", "_")), key)
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            lay_over(into[name], value)
        else:
            into[name] = value
