"""The environments of a script, as TRL's GRPOTrainer has them: an object for each completion, whose methods
the policy may call.

1. The factory is called once when it is read: what it makes shows which methods there are, as there. Those of
   the class that are public are tools, but reset and get_reward. One of another class has its own.
2. `reset` is called with the row of a completion before the policy is asked; what it returns is appended to
   the last message. It may return text, text as content blocks, or None.
3. `get_reward` is a reward function of weight 1, by the name of the class, behind those that a script gives.
   A process that one forks does not go on with the next.
4. Methods that are no coroutines are called in turn with reward functions (turns.py), as factory and reset
   are; coroutines on the loop of theirs.
5. What reset and get_reward cannot be called with is refused beforehand.
6. They are told apart from others by source texts: of the class and those that it inherits from, but for
   those of Python itself, and of the factory, with what a partial gives it.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import xxhash

from quartet.config.model import ConfigError
from quartet.rewards import forked
from quartet.rewards.callee import Callee, kind_of, looking_at
from quartet.rewards.functions import Failed
from quartet.rewards.own_loop import outcome

FACTORY: Final = "environment_factory"
RESET: Final = "reset"
REWARD: Final = "get_reward"
#: As long as what a tool says; a prompt with it fits into a message.
MAX_OPENING_BYTES: Final = 1 << 20
RIGHT: Final = "give a class, or a function without arguments, whose objects have reset(**columns)"


class Environments:
    """What a factory makes."""

    def __init__(self, factory: Any) -> None:
        """Makes one to look at. Raises ConfigError."""
        if isinstance(factory, Mapping):
            raise ConfigError(
                f"{FACTORY} = {kind_of(factory)} is refused: there is one of them here; give a class whose "
                "reset(**columns) chooses by a column"
            )
        if not callable(factory):
            raise ConfigError(f"{FACTORY} = {kind_of(factory)} is refused: {RIGHT}")
        self._factory = factory
        with looking_at(FACTORY, factory, RIGHT):
            made = factory()
            kind = self._kind = type(made)
            members = _functions_of(kind)
            #: Those that are tools, by their names, of the object that was looked at.
            self.methods = methods_of(made)
            if RESET not in members:
                raise ConfigError(f"{FACTORY}: {kind.__name__} has no method {RESET}; {RIGHT}")
            self._reset = Callee(RESET, made.reset)
            if self._reset.is_async:
                raise ConfigError(
                    f"{FACTORY}: {RESET} of {kind.__name__} is async, and TRL does not wait for it; write "
                    "it without"
                )
            self._has_reward = REWARD in members
            if self._has_reward:
                self._check_reward(Callee(REWARD, made.get_reward))
            # None is how a class leaves out what it inherits.
            elif (given := inspect.getattr_static(kind, REWARD, None)) is not None:
                raise ConfigError(
                    f"{FACTORY}: {REWARD} of {kind.__name__} is {kind_of(given)}, which is not called; write "
                    f"def {REWARD}(self), or leave it out"
                )
            #: Of what tells them apart from others (6).
            self.digest = self._digest()

    def _check_reward(self, own: Callee) -> None:
        """Raises ConfigError."""
        if why := own.own.refuses(()):
            raise ConfigError(
                f"{FACTORY}: {REWARD} of {self._kind.__name__}{own.place} is called without arguments, and "
                f"cannot be: {why}; keep what it needs in self"
            )

    def check(self, columns: Iterable[str]) -> None:
        """Whether reset can be called with rows of these columns. Raises ConfigError."""
        named = dict.fromkeys(columns)
        if why := self._reset.own.refuses((), named):
            raise ConfigError(
                f"{FACTORY}: {RESET} of {self._kind.__name__}{self._reset.place} cannot be called with "
                f"{', '.join(named) or 'nothing'}: {why}; add **columns to what it takes, and name only "
                "columns that the rows have"
            )

    def _digest(self) -> str:
        kinds = [one for one in self._kind.__mro__ if not _is_of_python(one)]
        factory = "" if self._factory is self._kind else Callee(FACTORY, self._factory).source
        told = "\0".join((self._kind.__name__, *map(_source_of, kinds), factory))
        return str(xxhash.xxh3_128_hexdigest(told.encode(errors="replace")))

    @property
    def reward(self) -> Callable[..., Any] | None:
        """As a reward function of all environments of a group (3)."""
        if not self._has_reward:
            return None
        kind, own = self._kind, getattr(self._kind, REWARD)

        # A factory may make objects of several classes: those of others have nothing to say, as there.
        def together(environments: list[Any], **_: Any) -> list[Any]:
            process, rewards = os.getpid(), []
            for one in environments:
                rewards.append(one.get_reward() if type(one) is kind else None)
                forked.leave(process)
            return rewards

        async def awaited(environments: list[Any], **_: Any) -> list[Any]:
            rewards = []
            for one in environments:
                rewards.append(await outcome(one.get_reward()) if type(one) is kind else None)
            return rewards

        found: Any = awaited if inspect.iscoroutinefunction(own) else together
        # Its place and its text are those of the method, and what it takes its own.
        found.__name__, found.__signature__ = kind.__name__, inspect.signature(found)
        found.__module__, found.__wrapped__ = kind.__module__, own
        return found  # type: ignore[no-any-return]

    def make(self) -> Any:
        """Another one."""
        return self._factory()

    def reset(self, made: Any, row: Mapping[str, Any]) -> Any:
        """What it returns, of a row of its own. Raises what it raises, and ValueError of what is no text."""
        said = made.reset(**copy.deepcopy(dict(row)))
        size = len(text_of(said).encode())
        if size > MAX_OPENING_BYTES:
            raise ValueError(f"{RESET} returned {size} bytes, and at most {MAX_OPENING_BYTES} are appended")
        return said

    def failed(self, error: BaseException) -> Failed:
        """Of what the factory or reset raised."""
        told = Callee(FACTORY, self._factory).own.told(error)
        return Failed(FACTORY, f"{FACTORY} {self._kind.__name__!r}: {told}", error)


def methods_of(made: Any) -> dict[str, Any]:
    """Those of an object that are tools (1)."""
    names = [one for one in _functions_of(type(made)) if one not in (RESET, REWARD) and one[0] != "_"]
    return {name: getattr(made, name) for name in names}


def _functions_of(kind: type) -> list[str]:
    return [name for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)]


def _is_of_python(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in sys.stdlib_module_names


def _source_of(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def text_of(said: Any) -> str:
    """What reset returned, as it is appended (2). Raises ValueError."""
    if said is None:
        return ""
    parts = [{"type": "text", "text": said}] if isinstance(said, str) else said
    is_parts = isinstance(parts, list) and all(isinstance(one, Mapping) for one in parts)
    if not is_parts or not all(
        one.get("type") == "text" and isinstance(one.get("text"), str) for one in parts
    ):
        raise ValueError(f"{RESET} returned {kind_of(said)}; it should be text, or None")
    return "".join(str(one["text"]) for one in parts).encode(errors="replace").decode()


def opened(prompt: list[Any], said: Any) -> list[Any]:
    """A prompt with what reset returned, as functions are given it."""
    if said is None:
        return prompt
    content = prompt[-1]["content"]
    if isinstance(said, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(said, str) and isinstance(content, list):
        said = [{"type": "text", "text": said}]
    return [*prompt[:-1], {**prompt[-1], "content": content + said}]
