"""Advantages of one's own: functions that the orchestrator's operator named in its configuration,
`advantages.<name> = "module:function"`. A run may only choose among them by name.

A function gets what is compared in one group (of one role, where agents are rewarded apart), and returns the
advantage of each, in its order:

    def mine(group: Sequence[Member]) -> list[float]:
        mean = sum(one.reward for one in group) / len(group)
        return [one.reward - mean for one in group]

1. One that cannot be imported, or not be called with a group, keeps the orchestrator from starting. A run
   that asks for one that is not named is refused when it is submitted.
2. It follows from the group alone: a batch that is sent again is credited again. One that answers otherwise
   when it is asked twice is refused, as is whatever is not one finite number for each.
   A run asks once about a batch that it sends in parts, and tells of afterwards (`Remembered`).
3. What is refused, or what it raises, is RunInterrupted, with its place: the run stops, its batch is whole,
   and a function that was mended credits it. The log has the traceback.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real

import structlog
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.own_function import OwnFunction, load
from quartet.run.config import RunConfig

from quartet_orchestrator.credit import Member
from quartet_orchestrator.outage import RunInterrupted
from quartet_orchestrator.parts import Own

# What a function is called with.
TAKES = ("group",)
# Advantages travel as float32.
MAX_ADVANTAGE = 3.4e38

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class OwnAdvantage:
    """A named function, checked."""

    name: str
    function: OwnFunction

    def __call__(self, groups: Iterable[Sequence[Member]]) -> list[list[float]]:
        """One advantage for each member. Raises RunInterrupted."""
        return [self._of(tuple(group)) for group in groups]

    def _of(self, group: tuple[Member, ...]) -> list[float]:
        first, second = self._asked(group), self._asked(group)
        if first != second:
            raise self._refused(
                f"it returned {first} and then {second} for one group; let it follow from the group alone"
            )
        return first

    def _asked(self, group: tuple[Member, ...]) -> list[float]:
        try:
            returned = self.function(group)
            found = list(returned) if isinstance(returned, Iterable) else None
        except (Exception, SystemExit) as error:  # its sys.exit() would end the runs beside it
            # Whoever reads of the run gets one sentence.
            log.error("advantage_raised", advantage=self.name, exc_info=error)
            told = self.function.told(error)
            raise self._refused(f"it raised at {told} (the orchestrator's log has the traceback)") from error
        if found is None or isinstance(returned, Mapping | Set | str):
            raise self._refused(f"it returned {type(returned).__name__}, not a list in the group's order")
        if len(found) != len(group):
            raise self._refused(f"it returned {len(found)} advantages for a group of {len(group)}")
        for one in found:
            if not isinstance(one, Real):
                raise self._refused(f"it returned {type(one).__name__} among its advantages, not a number")
        numbers = [_float(one) for one in found]
        for number in numbers:
            if not abs(number) <= MAX_ADVANTAGE:
                raise self._refused(f"it returned {number}, which is no finite number of float32")
        return numbers

    def _refused(self, what: str) -> RunInterrupted:
        return RunInterrupted(
            f"advantages.{self.name}: {what}; mend the function, which returns one finite number for each of "
            "a group, start the orchestrator again, then resume the run, which credits the batch again"
        )


class Remembered:
    """An advantage of a run, with its answer to what it was asked last."""

    def __init__(self, own: Own) -> None:
        """Asks nothing."""
        self._own = own
        self._asked: list[tuple[Member, ...]] = []
        self._answer: list[list[float]] = []

    def __call__(self, groups: Iterable[Sequence[Member]]) -> list[list[float]]:
        """As `own`. Raises what it raises, and remembers nothing of that."""
        asked = [tuple(group) for group in groups]
        if asked != self._asked:
            self._answer = self._own(asked)
            self._asked = asked
        return self._answer


def _float(one: Real) -> float:
    try:
        return float(one)
    except OverflowError:  # a whole number beyond all floats
        return math.inf


def load_advantages(paths: Mapping[str, str]) -> dict[str, OwnAdvantage]:
    """Import the functions. Raises ConfigError, in one sentence."""
    try:
        return {
            name: OwnAdvantage(name, load(f"advantages.{name}", path, TAKES)) for name, path in paths.items()
        }
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_named(config: RunConfig, known: Mapping[str, OwnAdvantage]) -> None:
    """Whether the run's own advantage is one of them. Raises INVALID_CONFIG."""
    name = config.algorithm.custom_advantage
    if name is None or name in known:
        return
    remedy = f'start the orchestrator with advantages.{name} = "package.module:function"'
    named = ", ".join(sorted(known))
    why = f"its advantages are {named}; name one of them, or {remedy}" if named else f"it has none; {remedy}"
    key = "algorithm.custom_advantage"
    said = f"{key} = {name!r} is refused by the orchestrator: {why}"
    raise QuartetError("INVALID_CONFIG", said, key=key, value=name, remedy=remedy)
