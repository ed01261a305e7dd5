"""Where a classic rollout's CPU time went, and what was done about it (benchmarks/rollouts.py measures it).

- Verifiers calls stop conditions, hooks and reward functions by the names of their parameters, and reads the
  signature anew for every call: some forty times in a rollout of four turns, more than a third of its CPU. It
  depends on the function alone, so it is remembered.
- Verifiers hands each answer's token lists to a thread, which puts them into a dict: the way there and back
  costs more than what is done there. It is done at once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

from verifiers.legacy.rubrics import rubric
from verifiers.legacy.utils import async_utils, response_utils


def remember_signatures() -> None:
    """Read each function's signature once in the life of this process."""
    remembering = SimpleNamespace(**{**vars(inspect), "signature": _signature})
    for module in (async_utils, rubric):
        module.inspect = remembering


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    if isinstance(function, MethodType):  # its object is left out: it may live no longer than a rollout
        return _read(function.__func__, bound=True)
    return _read(function, bound=False)


@functools.lru_cache(maxsize=4096)
def _read(function: Callable[..., Any], *, bound: bool) -> inspect.Signature:
    return inspect.signature(MethodType(function, function) if bound else function)


def sort_tokens_at_once() -> None:
    """Look at an answer's tokens on the loop."""
    response_utils.asyncio = SimpleNamespace(to_thread=_at_once)


async def _at_once(function: Callable[[], Any]) -> Any:
    return function()
