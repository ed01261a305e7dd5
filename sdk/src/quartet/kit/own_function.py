"""Functions of one's own, which the configuration of a service names: `KEY.NAME = "package.module:function"`.

1. One that cannot be loaded is refused in one sentence, with what to do; so is one that cannot be called as
   its service calls it, as far as it says what it takes (functions written in C do not).
2. What one raises is told with its place: the innermost line in its own package.
"""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# An error of the contract has room for the place, what happened, and what to do (quartet.errors).
MAX_TEXT_CHARS: Final = 240
NOTHING: Final[Mapping[str, object]] = {}


@dataclass(frozen=True, slots=True)
class OwnFunction:
    """A function that was loaded."""

    function: Callable[..., Any]
    #: Where it was found.
    module: str

    def __call__(self, *values: Any, **named: Any) -> Any:
        """What it returns, or raises."""
        return self.function(*values, **named)

    def refuses(self, takes: Sequence[str], named: Mapping[str, object] = NOTHING) -> str:
        """Why it cannot be called with these values, and those by name; empty where nothing is known."""
        try:
            inspect.signature(self.function).bind(*takes, **named)
        except TypeError as error:
            return str(error)
        except ValueError:
            pass  # written in C
        return ""

    def told(self, error: BaseException) -> str:
        """Of what it raised: "losses/mine.py:12 in tau: KeyError: 'x'"."""
        return _told(error, self.module)


def load(key: str, path: str, takes: Sequence[str], *, more: bool = False) -> OwnFunction:
    """Import what `key` names, to be called with values of these names; `more` may be given it by name.
    Errors: ValueError, in one sentence."""
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f'{key} = {path!r} is no import path; write "package.module:function"')
    try:
        function = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            why = f"{error}; install its package beside this service, or start it where {module!r} is found"
            raise ValueError(f"{key} = {path!r} cannot be imported: {why} (PYTHONPATH)") from error
        why = f"{_told(error, module)}; install what it imports beside this service, or mend it"
        raise ValueError(f"{key} = {path!r} cannot be imported: {why}") from error
    except AttributeError as error:
        raise ValueError(f"{key} = {path!r} cannot be imported: {_told(error, module)}") from error
    except (Exception, SystemExit) as error:  # a module of one's own may raise anything, and be a script
        raise ValueError(f"{key} = {path!r} cannot be imported: {_told(error, module)}; mend it") from error
    if not callable(function):
        raise ValueError(f"{key} = {path!r} is {type(function).__name__}, not a function")
    try:
        signature = inspect.signature(function)
        _ = signature.bind_partial(*takes) if more else signature.bind(*takes)
    except TypeError as error:
        call = f"function({', '.join(takes)})"
        raise ValueError(f"{key} = {path!r} cannot be called as {call}: {error}") from error
    except ValueError:
        pass  # written in C: it does not say what it takes
    return OwnFunction(function, module)


def text_of(error: BaseException) -> str:
    """What an error says, of whatever class it is."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - of a class of one's own
        return "(it has no text: its __str__ raises)"


def _told(error: BaseException, module: str) -> str:
    package = module.partition(".")[0]
    frames = [
        (frame.f_code, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package
    ]
    said = f"{type(error).__name__}: {text_of(error)[:MAX_TEXT_CHARS]}"
    if not frames:
        return said
    code, line = frames[-1]
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{line} in {code.co_name}: {said}"
