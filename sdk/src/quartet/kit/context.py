"""What travels with a request through one process: its id and its deadline.

1. A server puts both here when an RPC begins; a channel made by `quartet.kit.channel` adds both to every
   call made while the RPC is handled. So one id names the work in all four logs, and nobody works for a
   caller who has given up.
2. The deadline binds only while its RPC is handled: a task that outlives the RPC is not cut short by it.
3. Work that shall outlive its RPC from the start is begun with `background`, which inherits neither.
"""

from __future__ import annotations

import asyncio
import contextvars
import re
import time
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import structlog

from quartet.kit.fresh import fresh_id

T = TypeVar("T")

REQUEST_ID_KEY: Final = "x-request-id"
MAX_REQUEST_ID_CHARS: Final = 64
_DECENT: Final = re.compile(rf"[\w.:-]{{1,{MAX_REQUEST_ID_CHARS}}}", re.ASCII)

# What a server keeps of its caller's time, to answer before the caller gives up.
MARGIN_SECONDS: Final = 0.05
# gRPC rounds timeouts up on the wire, by up to about this share.
ROUNDING_SHARE: Final = 0.01


class Scope:
    """The time that the RPC being handled has left."""

    def __init__(self, remaining_s: float | None) -> None:
        """Begin a scope that ends in `remaining_s`, or never."""
        self._deadline = None if remaining_s is None else time.monotonic() + remaining_s
        self._open = True

    def close(self) -> None:
        """The RPC is over: tasks that inherited the scope are free of it."""
        self._open = False

    def remaining_s(self) -> float | None:
        """Seconds left, at least 0; None where nothing binds."""
        if self._deadline is None or not self._open:
            return None
        return max(0.0, self._deadline - time.monotonic())


_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("quartet_scope", default=None)
_request_id: contextvars.ContextVar[str] = contextvars.ContextVar("quartet_request_id", default="")

# The loop keeps only weak references to tasks.
_background: set[asyncio.Task[Any]] = set()


def enter(offered_id: str | None, remaining_s: float | None) -> tuple[str, Scope]:
    """Begin handling an RPC in the current task: its id (the caller's, if it is decent) and its scope."""
    chosen = offered_id if offered_id and _DECENT.fullmatch(offered_id) else new_request_id()
    scope = Scope(remaining_s)
    _request_id.set(chosen)
    _scope.set(scope)
    structlog.contextvars.bind_contextvars(request_id=chosen)
    return chosen, scope


def request_id() -> str:
    """The id of the request being worked on, or a new one outside any."""
    return _request_id.get() or new_request_id()


def new_request_id() -> str:
    """A fresh id."""
    return fresh_id()[:16]


def remaining_s() -> float | None:
    """Seconds that the RPC being handled has left; None outside any, or where its caller set no deadline."""
    scope = _scope.get()
    return None if scope is None else scope.remaining_s()


def bounded(timeout_s: float | None) -> float | None:
    """The timeout of an outgoing call: our own, or what our caller left us less a margin."""
    remaining = remaining_s()
    if remaining is None:
        return timeout_s
    margin = min(MARGIN_SECONDS + ROUNDING_SHARE * remaining, remaining / 10)
    inherited = max(0.001, remaining - margin)
    return inherited if timeout_s is None else min(timeout_s, inherited)


def background(work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
    """Start a task that outlives the RPC in which it is started: no inherited deadline, id or log fields."""
    task = asyncio.get_running_loop().create_task(work, name=name, context=contextvars.Context())
    _background.add(task)
    task.add_done_callback(_background.discard)
    return task
