"""Reward functions that may not fail in silence.

Classic Verifiers logs what a reward function raises and goes on with 0.0. Here every function of every
rubric is wrapped: what it raises (sys.exit, too), or returns that is no finite number, is noted for the
rollout that is being scored, and what a function of whole groups raises for all of its group.

1. Signatures stay as they are: Verifiers passes arguments by them. So do names, by which it tells scores;
   one without a name, a partial or an object, has that of what it calls or its class, and of functions of one
   environment that are named alike the second is NAME_2.
2. A rollout with a note has no reward; Verifiers' own arithmetic is left alone.
3. Where the members of a group are scored side by side, each has its own notes.
4. A function without weight that returns something else than a number, such as a table of scores, is no
   metric and no fault either: it has no part in the reward. Verifiers makes 0.0 of it; here it is absent.
5. A function of whole groups says one number for each member, in a list or an array, or it is a fault.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Set, Sized
from contextvars import ContextVar
from typing import Any, Final

from quartet.kit.own_tasks import from_outside

from quartet_envhost.own_code import OwnCode

# What went wrong while the current rollout, or group, was scored, one line each.
_faults: ContextVar[list[str]] = ContextVar("scoring_faults")
# The names of the functions that said no number for the current rollout.
_absent: ContextVar[set[str]] = ContextVar("absent_metrics")
# Where a state carries these two.
_FAULTS: Final = "quartet_scoring_faults"
_ABSENT: Final = "quartet_absent_metrics"


@contextlib.contextmanager
def noted(faults: list[str]) -> Iterator[None]:
    """Inside, faults are noted in this list."""
    token = _faults.set(faults)
    try:
        yield
    finally:
        _faults.reset(token)


def faults_of(state: Any) -> list[str]:
    """The notes of one rollout."""
    faults: list[str] = state.setdefault(_FAULTS, [])
    return faults


def absent_of(state: Any) -> set[str]:
    """The metrics that it has not."""
    absent: set[str] = state.setdefault(_ABSENT, set())
    return absent


def rubrics_of(env: Any) -> Iterator[Any]:
    """Every rubric of an environment: of its groups, and of the environments it is a mixture of."""
    for one in _parts_of(env):
        yield from _with_parts(one.rubric)


def _parts_of(env: Any) -> Iterator[Any]:
    yield env
    for part in getattr(env, "envs", ()):
        yield from _parts_of(part)


def _with_parts(rubric: Any) -> Iterator[Any]:
    yield rubric
    for part in getattr(rubric, "rubrics", ()):
        yield from _with_parts(part)


def watch(env: Any, own: OwnCode) -> dict[str, float]:
    """Wrap the reward functions of an environment, told with where they raise; the weight of each by name, of
    parts of a mixture that name one alike the least."""
    weights: dict[str, float] = {}
    seen: set[int] = set()
    for part in _parts_of(env):
        taken: set[str] = set()
        for rubric in _with_parts(part.rubric):
            if id(rubric) in seen:
                continue
            seen.add(id(rubric))
            for at, (function, weight) in enumerate(zip(rubric.funcs, rubric.weights, strict=True)):
                if getattr(function, "_quartet_watched", False):  # a list of functions that two rubrics share
                    known = weights[function.__name__]
                    weights[function.__name__] = min(known, weight) if known and weight else known or weight
                    continue
                name = _free(_name(function), weight, taken, weights)
                taken.add(name)
                weights[name] = min(weight, weights.get(name, weight))
                of_groups = rubric._is_group_func(function)
                measured = function if weight or of_groups else _metric(function, name)
                rubric.funcs[at] = _watched(measured, name, own, of_groups=of_groups)
            rubric._call_individual_reward_func = _charged(rubric._call_individual_reward_func)
            rubric._call_group_reward_func = _counted(rubric._call_group_reward_func)
    return weights


def _free(name: str, weight: float, taken: Container[str], weights: Mapping[str, float]) -> str:
    """The name, numbered where another function of its environment has it, or one of another part of the
    mixture that is a metric where this is a reward."""
    for number in itertools.count(1):
        free = name if number == 1 else f"{name}_{number}"
        if free not in taken and bool(weights.get(free, weight)) == bool(weight):
            return free
    raise AssertionError("there is always one more number")


def _charged(call: Callable[..., Any]) -> Callable[..., Any]:
    """The rubric's own way to call a function for one state, its faults noted for that state."""

    async def charged(func: Any, state: Any) -> Any:
        token = _absent.set(absent_of(state))
        try:
            with noted(faults_of(state)):
                return await call(func, state)
        finally:
            _absent.reset(token)

    return charged


def _counted(call: Callable[..., Any]) -> Callable[..., Any]:
    """The rubric's own way to call a function for a whole group, held to a number for each member."""

    async def counted(func: Any, states: list[Any]) -> Any:
        said = await call(func, states)
        if not isinstance(said, Sized) or isinstance(said, (str, Mapping, Set)):
            fault = f"it said {type(said).__name__}, not a list of {len(states)} numbers"
        elif len(said) != len(states):
            fault = f"it said {len(said)} numbers of {len(states)} answers"
        else:
            return said
        _faults.get().append(f"{func.__name__}: {fault}")
        return [0.0] * len(states)

    return counted


def _metric(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    async def metric(*args: Any, **kwargs: Any) -> Any:
        value = await _called(function, *args, **kwargs)
        try:
            float(value)
        except (TypeError, ValueError):
            _absent.get().add(name)
            return 0.0
        return value

    return metric


async def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    value = function(*args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def _watched(function: Callable[..., Any], name: str, own: OwnCode, *, of_groups: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        faults = _faults.get()
        try:
            value = await _called(function, *args, **kwargs)
            finite = of_groups or math.isfinite(float(value))
        except BaseException as error:
            if from_outside(error):
                raise
            fault = f"{name}: {own.text_of(error)}"
            faults.append(fault)
            # Of what it calls in tasks of their own only an exception leaves the other rollouts alive.
            raise RuntimeError(fault) from error
        if not finite:
            faults.append(f"not a finite number: {name}")
        return value

    watched.__name__ = name
    watched._quartet_watched = True  # type: ignore[attr-defined]
    return watched


def _name(function: Callable[..., Any]) -> str:
    """What plain Verifiers would tell by its address has a name here that every process gives it."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))
