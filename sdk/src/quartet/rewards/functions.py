"""Reward functions, called as TRL's GRPOTrainer calls them: of the completions of one group, by keywords.

1. They get prompts, completions, completion_ids, every other column of the row (repeated for each
   completion), trainer_state, log_extra and log_metric; all functions of a group the same objects.
2. Those that are no coroutines are called one at a time, in the order of the list, in one thread (turns.py);
   coroutines side by side on a loop of their own (own_loop.py). Neither delays the other.
3. What one raises, or answers that is no answer (answers.py), is a `Failed` of it, and no exception: it is
   raised again, as it is, in the thread that waits for the training.
4. Each has a name of its own: that of TRL, with a number where two have the same.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Final

import xxhash

from quartet.config.model import ConfigError
from quartet.rewards.answers import WrongAnswer, values_of
from quartet.rewards.callee import Callee, kind_of, looking_at, name_of
from quartet.rewards.logged import MAX_METRICS, Logged, unique
from quartet.rewards.own_loop import OwnLoop, outcome
from quartet.rewards.reward_model import RewardModel, models_of
from quartet.rewards.turns import Turns

STATE: Final = "trainer_state"
#: And where a script has them, the environments of the completions.
ENVIRONMENTS: Final = "environments"
#: What functions get besides the columns of a row.
KEYWORDS: Final = ("prompts", "completions", "completion_ids", STATE, "log_extra", "log_metric")
#: No function weighs as much.
MAX_WEIGHT: Final = 1e9
#: Names that are said to be passed over: whoever logs more of them knows by then.
MAX_SAID: Final = 8

logger = logging.getLogger("quartet.rewards")


@dataclass(frozen=True)
class Group:
    """What functions are given of the completions of one prompt: a value for each in every list."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    #: None where a script has none.
    environments: list[Any] | None = None
    #: For reward models: the run's, for chat templates.
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """What functions said."""

    #: Of each function, of each completion.
    values: Sequence[Sequence[float | None]]
    #: Of each completion.
    metrics: Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Failed:
    """A function that raised, or answered what is none."""

    function: str
    #: With the place.
    told: str
    error: BaseException


@dataclass(frozen=True)
class RewardFunction(Callee):
    """One of them; called is what the script gave, or a RewardModel."""

    weight: float

    def answer(self, group: Group, keywords: Mapping[str, Any]) -> Any:
        """What it answers, or where it is a coroutine, what is awaited for that."""
        if isinstance(self.call, RewardModel):
            return self.call.scores(group.prompts, group.completions, group.settings)
        return self.call(**keywords)

    def values(self, answer: Any, completions: int) -> list[float | None]:
        """What it answered. Raises WrongAnswer, which names it, and what a generator raises."""
        try:
            return values_of(answer, completions)
        except WrongAnswer as error:
            raise WrongAnswer(f"reward function {self.name!r}{self.place}: {error}") from None

    def failed(self, error: BaseException) -> Failed:
        """What it raised, or what is wrong with its answer."""
        if isinstance(error, WrongAnswer):
            return Failed(self.name, str(error), error)
        return Failed(self.name, f"reward function {self.name!r}: {self.own.told(error)}", error)


class RewardFunctions:
    """All functions of a script."""

    def __init__(
        self,
        functions: Any,
        weights: Sequence[float] | None = None,
        state: Callable[[], Any] | None = None,
        processing_classes: Any = None,
        own: Callable[..., Any] | None = None,
    ) -> None:
        """One function or a list of them; or reward models, with their tokenizers. `state` makes what
        functions get as trainer_state, and `own` is one of weight 1 behind them. Raises ConfigError."""
        given = list(functions) if isinstance(functions, list | tuple) else [functions]
        if len(given) == 1 and given[0] is None:
            given = []
        if own is None and not given:
            raise ConfigError(
                "reward_funcs is missing: give a function, or a list of them, that takes completions and "
                "returns a number for each"
            )
        given = models_of(given, processing_classes)
        for number, one in enumerate(given):
            _check(f"reward_funcs[{number}]" if len(given) > 1 else "reward_funcs", one)
        taken: set[str] = set()
        weighed = list(zip(given, _weights(weights, len(given)), strict=True))
        if own is not None:
            weighed.append((own, 1.0))
        self.functions = tuple(
            RewardFunction(unique(_name(one), taken), one, weight) for one, weight in weighed
        )
        #: Of what they are in this process: whoever edits the script meanwhile edits the next run's.
        self.digest = self._digest()
        self._state = state
        #: Where they are called, and what else a script gave to be called.
        self.turns, self.loop = Turns(), OwnLoop()
        #: To lend the thread that waits for the training (turns.py).
        self.lend = self.turns.lend
        self._said: set[str] = set()
        self._silence_is_said = False

    @property
    def names(self) -> tuple[str, ...]:
        """In their order."""
        return tuple(one.name for one in self.functions)

    def _digest(self) -> str:
        """Of their names, weights and source text."""
        state = xxhash.xxh3_128()
        for one in self.functions:
            state.update(f"{one.name}\0{one.weight!r}\0{one.source}\0".encode(errors="replace"))
        return str(state.hexdigest())

    def check(self, columns: Iterable[str]) -> None:
        """Whether each can be called with what rows of these columns give it. Raises ConfigError."""
        named = dict.fromkeys((*KEYWORDS, *columns))
        for one in self.functions:
            if not isinstance(one.call, RewardModel) and (why := one.own.refuses((), named)):
                given = ", ".join(map(str, named))
                raise ConfigError(
                    f"reward function {one.name!r}{one.place} cannot be called with {given}: "
                    f"{why}; add **kwargs to what it takes, and name only columns that the rows have"
                )

    async def score(self, group: Group) -> Scores | Failed:
        """What they say of a group."""
        completions = len(group.completions)
        logged = Logged(completions)
        try:
            state = None if self._state is None else await asyncio.to_thread(self._state)
        except Exception as error:  # noqa: BLE001 - of whoever made it
            return Failed(STATE, f"{STATE}: {error}", error)
        keywords: dict[str, Any] = {
            **group.columns,
            "prompts": group.prompts,
            "completions": group.completions,
            "completion_ids": group.completion_ids,
            STATE: state,
            "log_extra": logged.log_extra,
            "log_metric": logged.log_metric,
            **({} if group.environments is None else {ENVIRONMENTS: group.environments}),
        }
        found: dict[str, list[float | None]] = {}

        def in_turn() -> Failed | None:
            for one in self.functions:
                if not one.is_async:
                    self.turns.doing(f"reward function {one.name!r}{one.place}")
                    try:
                        found[one.name] = one.values(one.answer(group, keywords), completions)
                        self.turns.leave_child()
                    except BaseException as error:  # noqa: BLE001 - whatever a script raises is its own
                        self.turns.leave_child(error)
                        return one.failed(error)
            return None

        async def beside(one: RewardFunction) -> Failed | None:
            try:
                found[one.name] = one.values(await outcome(one.answer(group, keywords)), completions)
            except BaseException as error:  # noqa: BLE001 - likewise
                return one.failed(error)
            return None

        asked = [self.loop.call(functools.partial(beside, one)) for one in self.functions if one.is_async]
        if len(asked) < len(self.functions):
            asked.append(self.turns.call(in_turn))
        if (failed := await first_that_failed(asked)) is not None:
            return failed
        scores = Scores([found[name] for name in self.names], logged.metrics(self.names))
        self._say(group, scores, logged)
        return scores

    def _say(self, group: Group, scores: Scores, logged: Logged) -> None:
        """What whoever wrote them should know, once."""
        for column in sorted(logged.dropped - self._said)[: max(0, MAX_SAID - len(self._said))]:
            self._said.add(column)
            logger.warning(
                "what functions log as %r is passed over: kept is a number for each completion, of %d names",
                column,
                MAX_METRICS,
            )
        silent = [at for at, values in enumerate(zip(*scores.values, strict=True)) if set(values) == {None}]
        if silent and not self._silence_is_said:
            self._silence_is_said = True
            logger.warning(
                "all reward functions answered None, which counts as 0, of the completion %.200r to the "
                "prompt %.200r",
                group.completions[silent[0]],
                group.prompts[silent[0]],
            )


async def first_that_failed(asked: Sequence[Coroutine[Any, Any, Failed | None]]) -> Failed | None:
    """Waits for all, or until one failed; the others are then asked to end."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    try:
        for ended in asyncio.as_completed(tasks):
            if (failed := await ended) is not None:
                return failed
    finally:
        for task in tasks:
            task.cancel()
    return None


def _check(key: str, function: Any) -> None:
    """Raises ConfigError."""
    if isinstance(function, RewardModel):
        return
    if isinstance(function, str):
        raise ConfigError(
            f"{key} = {function!r} is refused: load that reward model in the script, and give it instead: "
            f"transformers.AutoModelForSequenceClassification.from_pretrained({function!r}, num_labels=1)"
        )
    right = "give a function, or an object with __call__"
    if isinstance(function, type) or not callable(function):
        raise ConfigError(f"{key} = {kind_of(function)} is refused: {right}")
    with looking_at(key, function, right):
        called = RewardFunction(name_of(function), function, 1.0)
        _ = called.is_async, called.place, called.source, called.own


def _weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """Raises ConfigError."""
    if weights is None:
        return [1.0] * count
    if not isinstance(weights, Sequence):
        raise ConfigError(f"reward_weights = {weights!r} is refused: give a list, a number for each function")
    if len(weights) != count:
        raise ConfigError(
            f"reward_weights has {len(weights)} numbers for {count} reward functions; give one for each"
        )
    for number, weight in enumerate(weights):
        is_number = isinstance(weight, Real) and not isinstance(weight, bool)
        if not is_number or not -MAX_WEIGHT <= weight <= MAX_WEIGHT:
            raise ConfigError(
                f"reward_weights[{number}] = {weight!r} is refused: give a number within {MAX_WEIGHT:g} "
                "(0 makes a metric)"
            )
    return [float(weight) for weight in weights]


def _name(function: Any) -> str:
    """As TRL calls it."""
    return function.name if isinstance(function, RewardModel) else name_of(function)
