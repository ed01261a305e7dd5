"""What reward functions log of one group, by `log_metric` and `log_extra` as TRL gives them.

1. `log_metric(name, value)` is a number of the whole group, and a metric of each of its completions: their
   mean over a step is TRL's mean over its calls. Logged several times it is the mean of these.
2. `log_extra(column, values)` has a value for each completion. Those that are numbers are metrics of theirs;
   others (text, such as a parsed answer) have no place in a rollout's metrics, and are passed over.
3. NaN says nothing, as TRL's means pass it over. What else is no finite number is the function's error.
4. Kept are MAX_METRICS names, of MAX_NAME_BYTES each; `dropped` has what was passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from quartet.rewards.answers import number_of

#: More than a person follows; and of a group of 1024 they fit into a message with names of that length.
MAX_METRICS: Final = 32
MAX_NAME_BYTES: Final = 64


class Logged:
    """Of one group. Functions may log in two threads."""

    def __init__(self, completions: int) -> None:
        self._completions = completions
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}
        #: Columns that were passed over.
        self.dropped: set[str] = set()

    def log_metric(self, name: str, value: Any) -> None:
        """As TRL has it."""
        number = number_of(value)
        if math.isinf(number):
            raise ValueError(f"log_metric({name!r}, {value!r}): it should be finite")
        values = self._values(self._metrics, name)
        if not math.isnan(number):
            values.append(number)

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """As TRL has it."""
        self._values(self._columns, column).extend(values)

    def metrics(self, taken: Iterable[str] = ()) -> list[dict[str, float]]:
        """Of each completion. Names that are taken already get a number."""
        found: list[dict[str, float]] = [{} for _ in range(self._completions)]
        names, kept = set(taken), 0
        for name, values in self._by_completion():
            if kept == MAX_METRICS:
                self.dropped.add(name)
                continue
            kept += 1
            own = unique(name, names)
            for metrics, value in zip(found, values, strict=True):
                if value is not None:
                    metrics[own] = number_of(value)
        return found

    def _by_completion(self) -> Iterator[tuple[str, Sequence[Any]]]:
        """What is a metric, with its value for each."""
        for name, numbers in self._metrics.items():
            if numbers:
                yield name, [math.fsum(numbers) / len(numbers)] * self._completions
        for column, values in self._columns.items():
            if len(values) == self._completions and all(map(_is_number, values)):
                yield column, values
            else:
                self.dropped.add(column)

    @staticmethod
    def _values(named: dict[str, list[Any]], name: Any) -> list[Any]:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{name!r} is no name of a metric or a column; give text")
        return named.setdefault(name.encode(errors="replace")[:MAX_NAME_BYTES].decode(errors="ignore"), [])


def unique(name: str, taken: set[str]) -> str:
    """The name, with a number where it is taken; taken from now on."""
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}-{number}"
    taken.add(found)
    return found


def _is_number(value: Any) -> bool:
    """Whether it is one, or says nothing."""
    if value is None:
        return True
    try:
        return math.isfinite(number_of(value))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False
