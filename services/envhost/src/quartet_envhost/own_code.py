"""Where an environment's own code raised: told in front of a failure's message, and once in the worker's log.

1. Its own code is its package, and whatever else is not installed in the interpreter; never the standard
   library, Verifiers or this project.
2. The place is the innermost frame there of what was raised, or of what that was raised from where its own
   code only passed it on. Of a SyntaxError in its package it is the line that cannot be read.
3. A kind of failure, its type and its place, is logged once with its traceback; MAX_KINDS of them at most.
4. Of a call over HTTP that failed, such as a judge's, is told what was called: clients leave that out.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Final

from quartet.kit.own_function import text_of

from quartet_envhost.config import canonical_id, is_built_in

# A failure's message has room for the place and what happened.
MAX_PLACE_CHARS: Final = 160
# A failure's message is cut to less; a text may be a whole page.
MAX_TEXT_CHARS: Final = 4_000
# A thousand rollouts fail in few ways; an environment that finds new ones for ever writes no more than these.
MAX_KINDS: Final = 100
# Longer ones, such as of a message that holds a whole page, lose their middle.
MAX_TRACEBACK_CHARS: Final = 16_000
# Of errors raised from errors; a chain may be a ring.
MAX_CHAIN: Final = 20
_INSTALLED: Final = {"site-packages", "dist-packages"}
# Of HTTP; clients of judges have the one or the other.
_CLIENTS: Final = {"httpx", "httpx2"}
# Not always installed: a developer's are where they are written.
_LIBRARIES: Final = ("verifiers", "quartet", "quartet_envhost")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnFiles:
    """Which files of an interpreter are the code of one environment (1)."""

    package: str
    # Folders of the standard library, Verifiers and this project.
    foreign: Sequence[str]

    @classmethod
    def of(cls, env_id: str) -> OwnFiles:
        """In this interpreter. Imports nothing: the environment's package may be what raises."""
        if is_built_in(env_id):  # it has none here
            return cls(canonical_id(env_id), [os.sep])
        foreign = [sysconfig.get_path("stdlib")]
        for library in _LIBRARIES:
            spec = importlib.util.find_spec(library)
            assert spec is not None, library
            foreign += spec.submodule_search_locations or []
        return cls(canonical_id(env_id), foreign)

    def has(self, file: str) -> bool:
        """Whether it is one of them."""
        path = Path(file)
        if not path.is_absolute():  # "<string>" and the like
            return False
        for at, folder in enumerate(path.parts):
            if folder in _INSTALLED:
                return Path(path.parts[at + 1]).stem == self.package
        return not any(path.is_relative_to(one) for one in self.foreign)

    def has_in_package(self, file: str) -> bool:
        """Whether it is one of the package itself, and none that the environment wrote as it went."""
        return self.has(file) and self.package in (Path(part).stem for part in Path(file).parts)


class OwnCode:
    """The code of one environment, as far as it raises."""

    def __init__(self, env_id: str) -> None:
        """Log nothing yet."""
        self.files = OwnFiles.of(env_id)
        self._logged: set[tuple[type[BaseException], str]] = set()

    def text_of(self, error: BaseException) -> str:
        """ "my_env/rewards.py:12 in exact: KeyError: 'answer'", without a place where no own code raised."""
        place = self._place(error)
        kind = (type(error), place)
        if kind not in self._logged and len(self._logged) < MAX_KINDS:
            self._logged.add(kind)
            log.error(
                "the first failure of its kind, and the only one that this log has:\n%s",
                _shortened(traceback.format_exception(error)),
            )
        said = _said(error) + _called(error)
        return f"{place}: {said}" if place else said

    def _place(self, error: BaseException) -> str:
        around = ""
        for one in _chain(error):
            if isinstance(one, SyntaxError) and one.filename and self.files.has_in_package(one.filename):
                return place_of(one.filename, one.lineno or 1, "<module>")
            frames = _frames(one)
            own = [frame for frame in frames if self.files.has(frame[0].co_filename)]
            if not own:
                continue
            if own[-1] == frames[-1] or one.__cause__ is None:
                return _place_of(own[-1])
            # What it was raised from may be own code, too, such as a tool in an overridden `env_response`.
            around = around or _place_of(own[-1])
        return around


def place_of(file: str, line: int, function: str) -> str:
    """ "my_env/rewards.py:12 in exact"."""
    place = f"{'/'.join(Path(file).parts[-2:])}:{line} in {function}"
    return place if len(place) <= MAX_PLACE_CHARS else f"…{place[1 - MAX_PLACE_CHARS :]}"


def _place_of(frame: tuple[CodeType, int]) -> str:
    code, line = frame
    return place_of(code.co_filename, line, code.co_name)


def _said(error: BaseException) -> str:
    """Its type and text; one without text, as Verifiers wraps errors of tools in, is told with its cause."""
    text, cause = _text(error), error.__cause__
    if not text and cause is not None:
        text = f"{type(cause).__name__}: {_text(cause)}"
    return f"{type(error).__name__}: {text}"


def _called(error: BaseException) -> str:
    """ " (http://judge:8000/v1/chat/completions)", as errors of _CLIENTS and of what is made of them have it;
    without user and query, which may be secrets."""
    for one in _chain(error):
        request: Any = vars(one).get("request", vars(one).get("_request"))
        if type(request).__module__.partition(".")[0] in _CLIENTS:
            return f" ({request.url.scheme}://{request.url.netloc.decode()}{request.url.path})"
    return ""


def _text(error: BaseException) -> str:
    return text_of(error)[:MAX_TEXT_CHARS]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """What was raised and what it was raised from, in this order; of a group of errors the first."""
    one: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if one is None:
            return
        yield one
        if isinstance(one, BaseExceptionGroup):
            one = one.exceptions[0]
        elif one.__cause__ is not None or one.__suppress_context__:
            one = one.__cause__
        else:
            one = one.__context__


def _frames(error: BaseException) -> list[tuple[CodeType, int]]:
    return [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def _shortened(lines: list[str]) -> str:
    text = "".join(lines)
    if len(text) <= MAX_TRACEBACK_CHARS:
        return text
    half = MAX_TRACEBACK_CHARS // 2
    return f"{text[:half]}\n…\n{text[-half:]}"
