"""What a file of prime-rl says, read key by key, so that in the end it is known what nobody read.

1. The first of several paths that are one key is the one that a default is told by. Two that are given and
   differ are refused: there the parts would not fit together, too.
2. "None" is no value, as prime-rl reads it; it is given nevertheless.
3. Whatever was not read is left out with a reason, or refused: `rest`. What was read and has no effect beside
   other keys is told as such: `idle`.
"""

from __future__ import annotations

import copy
import difflib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quartet.config import ConfigError
from quartet.config.refusals import together
from quartet.run.dialect import RunDraft, Tables, refusal, refuse, shown
from quartet.run.prime_rl.keys import Refusals

_ABSENT: Final = object()
#: Of a known key to an unknown one, from which on it is taken for what was meant (difflib's ratio).
LIKENESS: Final = 0.75


@dataclass(frozen=True)
class Said:
    """A value, and where the file says it."""

    value: Any
    source: str
    is_given: bool

    def number(self, least: float = 0.0) -> float:
        """Raises ConfigError."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            refuse(self.source, value, "should be a number")
        if value < least:
            refuse(self.source, value, f"should be at least {least:g}")
        return float(value)

    def count(self, least: int = 1) -> int:
        """Raises ConfigError."""
        if type(self.value) is not int or not least <= self.value < 2**32:
            refuse(self.source, self.value, f"should be a whole number from {least} on")
        return int(self.value)

    def flag(self) -> bool:
        """Raises ConfigError."""
        if not isinstance(self.value, bool):
            refuse(self.source, self.value, "should be true or false")
        return self.value

    def table(self) -> Tables:
        """Raises ConfigError."""
        if not isinstance(self.value, dict):
            refuse(self.source, self.value, "should be a table")
        return dict(self.value)


#: Of a translation, and the tables that it reads.
Part = tuple[Callable[[], object], tuple[str, ...]]


class Given:
    """Tables of a file, or of one entry of a list in it, which is then named by `place`."""

    def __init__(self, tables: Mapping[str, Any], place: str = "") -> None:
        """They stay as they are."""
        self._tables: Tables = _without_none(copy.deepcopy(dict(tables)))
        self.place = place
        self._read: set[tuple[str, ...]] = set()
        self._known: set[str] = set()

    def take(self, *paths: str, default: Any = None) -> Said:
        """The value at one of these paths, which are one key. Raises ConfigError where two differ."""
        self._known.update(paths)
        found = [(path, value) for path in paths if (value := self._at(path)) is not _ABSENT]
        self._read.update(tuple(path.split(".")) for path in paths)
        if not found:
            return Said(default, f"prime-rl's default of {self.named(paths[0])}", False)
        path, value = found[0]
        for other, differs in found[1:]:
            if differs != value:
                refuse(self.named(other), differs, f"{self.named(path)} says otherwise; keep one of the two")
        return Said(value, self.named(path), True)

    def nearest(self, *paths: str, default: Any = None) -> Said:
        """That of the first path that is given: a part's own value wins over the shared one."""
        self._known.update(paths)
        self._read.update(tuple(path.split(".")) for path in paths)
        for path in paths:
            if (value := self._at(path)) is not _ABSENT:
                return Said(value, self.named(path), True)
        return Said(default, f"prime-rl's default of {self.named(paths[-1])}", False)

    def idle(self, why: str, *paths: str) -> Iterator[str]:
        """Of each of these keys that is given, that it has no effect beside the others, and why."""
        for path in paths:
            said = self.take(path)
            if said.is_given:
                yield shown(said.source, said.value, why)

    def peek(self, path: str) -> Any:
        """What stands there, or None; it is not read by that."""
        return None if (value := self._at(path)) is _ABSENT else value

    def __contains__(self, path: str) -> bool:
        """Whether something stands there, were it "None"."""
        return self._at(path) is not _ABSENT

    def entries(self, *paths: str) -> list[Given]:
        """The tables of a list. Raises ConfigError."""
        said = self.take(*paths, default=[])
        if not isinstance(said.value, list) or not all(isinstance(one, dict) for one in said.value):
            refuse(said.source, said.value, "should be a list of tables")
        return [Given(one, f"{said.source}.{number}") for number, one in enumerate(said.value)]

    def named(self, path: str) -> str:
        """As a person finds it in the file."""
        return f"{self.place}.{path}" if self.place else path

    def rest(
        self,
        left_out: Mapping[str, str],
        refused: Refusals,
        silent: Collection[str] = (),
    ) -> Iterator[str | ConfigError]:
        """Of each key that nobody read, that it is left out, or why it is refused; of a table as one.
        `refused` has values that say nothing, and the remedy for others. `silent`: whose reader failed.
        """
        told: set[str] = set()
        for path, value in self._leaves(self._tables, ()):
            dotted = ".".join(path)
            if (rule := _rule(left_out, dotted)) is not None:
                if rule not in told and self._at(rule) != {}:
                    yield shown(self.named(rule), self._at(rule), left_out[rule])
                told.add(rule)
            elif (rule := _rule(refused, dotted)) is not None:
                nothing, remedy = refused[rule]
                if value is not None and value not in nothing and rule not in told:
                    told.add(rule)
                    yield refusal(self.named(dotted), value, remedy)
            elif not (value in ({}, None) and self._is_known(dotted)) and _rule(silent, dotted) is None:
                yield refusal(self.named(dotted), value, self._remedy(dotted, {*left_out, *refused}))

    def _remedy(self, dotted: str, others: set[str]) -> str:
        if self._is_known(dotted):
            return "should be a table"
        # With their tables all keys of one look alike: a key's own name is compared, too.
        name = dotted.rpartition(".")[2]
        ends = {key: key.rpartition(".")[2] for key in sorted({*self._known, *others})}
        alike = [key for key in ends if difflib.get_close_matches(name, [ends[key]], cutoff=LIKENESS)]
        close = difflib.get_close_matches(dotted, alike, n=1, cutoff=LIKENESS)
        return (
            f"did you mean {self.named(close[0])!r}?" if close else "Quartet has no such setting; remove it"
        )

    def _is_known(self, dotted: str) -> bool:
        return any(known == dotted or known.startswith(f"{dotted}.") for known in self._known)

    def _at(self, path: str) -> Any:
        node: Any = self._tables
        for part in path.split("."):
            if not isinstance(node, dict) or part not in node:
                return _ABSENT
            node = node[part]
        return node

    def _leaves(self, table: Tables, prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        for key, value in table.items():
            path = (*prefix, key)
            if path in self._read:
                continue
            if isinstance(value, dict) and value:
                yield from self._leaves(value, path)
            else:
                yield path, value


def _rule(rules: Collection[str], dotted: str) -> str | None:
    """The nearest of these paths that is the key, or a table around it."""
    parts = dotted.split(".")
    paths = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((path for path in paths if path in rules), None)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_none(one) for one in value]
    return None if value == "None" else value


def told_together(parts: Iterable[Part]) -> tuple[list[ConfigError], list[str]]:
    """Run all parts: what they refuse, and the tables of those that failed, of which nobody knows what else
    they would have read."""
    refused: list[ConfigError] = []
    silent: list[str] = []
    for part, reads in parts:
        try:
            part()
        except ConfigError as error:
            refused += error.each
            silent += reads
    return refused, silent


def leave_rest(given: Given, run: RunDraft, left_out: Mapping[str, str], refused: Refusals) -> None:
    """Tells what of an entry has no effect. Raises ConfigError for whatever else was not read."""
    unread = list(given.rest(left_out, refused))
    run.leave(one for one in unread if isinstance(one, str))
    if wrong := [one for one in unread if isinstance(one, ConfigError)]:
        raise together(wrong)


def one_of_all(what: str, said: Sequence[Said]) -> Said | None:
    """What all environments say; None where there are none. Raises ConfigError."""
    for other in said[1:]:
        if other.value != said[0].value:
            refuse(
                other.source, other.value, f"all environments of a run have one {what}; give them the same"
            )
    return said[0] if said else None
