"""What a script gave to be called: a function, a partial of one, or an object with __call__.

1. Its name is TRL's: that of the function, or of the object's class.
2. Its place and its source text are those of the function itself, whatever is wrapped around it; behind the
   text is what a partial gives it, of objects the class.
3. An object may raise whatever it is asked for: that is refused where it is looked at first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quartet.config.model import ConfigError
from quartet.kit.own_function import OwnFunction, text_of

#: What a partial gives is told so deep; a list may hold itself.
MAX_DEPTH: Final = 8


@dataclass(frozen=True)
class Callee:
    """One of them."""

    name: str
    #: As the script gave it.
    call: Any

    @property
    def is_async(self) -> bool:
        """Whether calling it makes a coroutine; of a partial or an object with __call__, too."""
        inner = _inner(self.call)
        return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(
            getattr(inner, "__call__", None)  # noqa: B004 - the method itself is asked for
        )

    @property
    def own(self) -> OwnFunction:
        """As code of one's own, which tells where it raised."""
        inner = _inner(self.call)
        module = getattr(inner, "__module__", None) or type(inner).__module__
        return OwnFunction(self.call, module)

    @property
    def place(self) -> str:
        """ " (script.py:12)"; empty where there is no source."""
        code = getattr(_written(self.call), "__code__", None)
        return "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"

    @property
    def source(self) -> str:
        """Its text; empty where there is none."""
        try:
            text = inspect.getsource(_written(self.call))
        except (OSError, TypeError):
            text = ""
        return text + _given(self.call)


@contextmanager
def looking_at(key: str, given: Any, right: str) -> Iterator[None]:
    """What it raises inside is a ConfigError, which says what to give instead."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raised = " ".join(f"{type(error).__name__}: {text_of(error)}".split())
        raise ConfigError(
            f"{key} = {kind_of(given)} is refused: looked at, it raises {raised}; {right}"
        ) from error


def name_of(call: Any) -> str:
    """As TRL calls it."""
    inner = _inner(call)
    return str(getattr(inner, "__name__", "") or type(inner).__name__)


def kind_of(given: Any) -> str:
    """Of what is no function, in a refusal."""
    return f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__


def _inner(call: Any) -> Any:
    """What a partial is of."""
    while isinstance(call, functools.partial):
        call = call.func
    return call


def _given(call: Any) -> str:
    """What partials give; the same in every process."""
    given = ""
    while isinstance(call, functools.partial):
        if call.args or call.keywords:
            given += f"\0{_told(call.args)}{_told(call.keywords)}"
        call = call.func
    return given


def _told(value: Any, depth: int = 0) -> str:
    if value is None or isinstance(value, str | bytes | int | float):
        return repr(value)
    if isinstance(value, dict | list | tuple | set | frozenset) and depth < MAX_DEPTH:
        items = value.items() if isinstance(value, dict) else value
        told = [_told(one, depth + 1) for one in items]
        # Those of a set come in another order in each process.
        told = sorted(told) if isinstance(value, set | frozenset) else told
        return f"{type(value).__name__}({', '.join(told)})"
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _written(call: Any) -> Any:
    """What has source text: a function, or the class of an object."""
    inner = inspect.unwrap(_inner(call))
    is_function = inspect.isfunction(inner) or inspect.ismethod(inner)
    return inner if is_function else type(inner)
