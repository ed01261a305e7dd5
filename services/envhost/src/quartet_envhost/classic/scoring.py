"""Reward functions that may not fail in silence.

Classic Verifiers logs what a reward function raises and goes on with 0.0. Here every function of every
rubric is wrapped: what it raises, or returns that is no finite number, is noted for the rollout that is being
scored.

1. Signatures and names stay as they are: Verifiers passes arguments by them.
2. A rollout with a note has no reward; Verifiers' own arithmetic is left alone.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

# What went wrong while the current rollout was scored, one line each.
scoring_faults: ContextVar[list[str]] = ContextVar("scoring_faults")


def rubrics_of(env: Any) -> Iterator[Any]:
    """Every rubric of an environment: of its groups, and of the environments it is a mixture of."""
    yield from _with_parts(env.rubric)
    for part in getattr(env, "envs", ()):
        yield from rubrics_of(part)


def _with_parts(rubric: Any) -> Iterator[Any]:
    yield rubric
    for part in getattr(rubric, "rubrics", ()):
        yield from _with_parts(part)


def watch(env: Any) -> dict[str, float]:
    """Wrap the reward functions of an environment; the weight of each by name."""
    weights: dict[str, float] = {}
    seen: set[int] = set()
    for rubric in rubrics_of(env):
        if id(rubric) in seen:
            continue
        seen.add(id(rubric))
        weights.update(zip([_name(one) for one in rubric.funcs], rubric.weights, strict=True))
        rubric.funcs[:] = [_watched(one) for one in rubric.funcs]
    return weights


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(function, "_quartet_watched", False):  # a list of functions that two rubrics share
        return function

    @functools.wraps(function)
    async def watched(*args: Any, **kwargs: Any) -> Any:
        faults = scoring_faults.get()
        try:
            value = function(*args, **kwargs)
            if inspect.isawaitable(value):
                value = await value
            finite = math.isfinite(float(value))
        except Exception as error:
            faults.append(f"{_name(function)}: {type(error).__name__}: {error}")
            raise
        if not finite:
            faults.append(f"not a finite number: {_name(function)}")
        return value

    watched._quartet_watched = True  # type: ignore[attr-defined]
    return watched


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", repr(function)))
