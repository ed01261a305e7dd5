"""Reward functions and metrics of a v1 task that say no number, told by their names.

Verifiers awaits all of them together and makes floats of what they say: what is no coroutine, or says None,
fails there, far from its own code and without its name. So does what says numbers by names that are no text.

Pinned to verifiers 0.4.0: it wraps `Task.hooks`, from which scoring takes them.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import verifiers.v1 as vf

#: Hooks whose values are numbers.
_SCORES: Final = ("reward", "metric")

_hooks: Final = vf.Task.hooks


def name_scores() -> None:
    """Let every reward and metric be checked under its name."""

    def named(self: Any, attr: str) -> list[Callable[..., Any]]:
        found: list[Callable[..., Any]] = _hooks(self, attr)
        return [_checked(attr, one) for one in found] if attr in _SCORES else found

    vf.Task.hooks = named


def _checked(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def checked(*args: Any, **kwargs: Any) -> Any:
        said = function(*args, **kwargs)
        if not inspect.isawaitable(said):
            raise TypeError(f"{kind} {function.__name__} is no coroutine: write `async def`")
        said = await said
        several: Mapping[Any, Any] = said if isinstance(said, Mapping) else {function.__name__: said}
        for name, value in several.items():
            if not isinstance(name, str):
                raise TypeError(f"{kind} {function.__name__} said {reprlib.repr(said)}: a name is a text")
            try:
                float(value)
            except (TypeError, ValueError, OverflowError):
                text = f"{kind} {function.__name__} said {reprlib.repr(value)}, which is no number"
                raise TypeError(text) from None
        return said

    return checked
