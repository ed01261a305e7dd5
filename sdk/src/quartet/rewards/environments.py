"""The environments of a script, as TRL's GRPOTrainer has them: an object for each completion, whose methods
the policy may call.

1. The factory is called once when it is read: what it makes shows which methods there are, as there. Those of
   the class that are public are tools, but reset and get_reward.
2. `reset` is called with the row of a completion before the policy is asked; what it returns is appended to
   the last message. It may return text, text as content blocks, or None.
3. `get_reward` is a reward function of weight 1, by the name of the class, behind those that a script gives.
   A process that one forks does not go on with the next.
4. Methods that are no coroutines are called in turn with reward functions (turns.py), as factory and reset
   are; coroutines on the loop of theirs.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping
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
            members = [name for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)]
            #: Those that are tools, by their names, of the object that was looked at.
            self.methods = {
                name: getattr(made, name)
                for name in members
                if name not in (RESET, REWARD) and not name.startswith("_")
            }
            if RESET not in members:
                raise ConfigError(f"{FACTORY}: {kind.__name__} has no method {RESET}; {RIGHT}")
            if Callee(RESET, made.reset).is_async:
                raise ConfigError(
                    f"{FACTORY}: {RESET} of {kind.__name__} is async, and TRL does not wait for it; write "
                    "it without"
                )
        self._has_reward = REWARD in members

    @property
    def digest(self) -> str:
        """Of the name and the source text of the class, and those of the factory."""
        try:
            source = inspect.getsource(self._kind)
        except (OSError, TypeError):
            source = ""
        factory = "" if self._factory is self._kind else Callee(FACTORY, self._factory).source
        told = "\0".join((self._kind.__name__, source, factory))
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
