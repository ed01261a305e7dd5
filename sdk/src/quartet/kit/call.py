"""Calls with deadlines, typed errors, and retries within a budget.

1. Whatever goes wrong is a QuartetError (or asyncio's own cancellation); a channel that was closed before is
   gRPC's UsageError.
2. `unary` tries again only after NOT_READY and OVERLOADED, only within its budget, and never beyond
   `timeout_s`, which bounds all attempts and the waiting between them together. Every RPC of the contract
   is safe to repeat.
3. `stream` never waits longer than `idle_timeout_s` for the next message, and cancels its call when it is
   left. A stretch in which the loop did not run is no silence of the peer's (awake.py).
4. What the peer ended a call with is what is raised, also where a message was being written then (of `unary`
   with a stream of requests, of `stream` with `sends`): grpc.aio has that replaced by an error of its own,
   mostly after it was told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final

import grpc
import pydantic
from google.protobuf.message import Message

from quartet.config import Config
from quartet.errors import LOST_STATUS, QuartetError, from_rpc
from quartet.kit import context as request_context
from quartet.kit.awake import awake_s
from quartet.kit.backoff import pause_s

RETRYABLE: Final = frozenset({"NOT_READY", "OVERLOADED"})


class RetryBudget(Config):
    """How often and how soon to try again (quartet.kit.backoff)."""

    max_attempts: int = pydantic.Field(default=5, ge=1, le=1000)
    initial_backoff_s: float = pydantic.Field(default=0.1, gt=0)
    max_backoff_s: float = pydantic.Field(default=5.0, gt=0)

    def delay_s(self, attempt: int, error: QuartetError) -> float:
        """How long to wait after failed attempt number `attempt` (1, 2, ...).

        At least what the peer asked for, up to max_backoff_s.
        """
        asked_s = (error.retry_after_ms or 0) / 1000
        # Jitter on top of what was asked for, or everybody who was refused comes back at once.
        own_s = pause_s(attempt - 1, self.initial_backoff_s, self.max_backoff_s)
        return min(asked_s, self.max_backoff_s) + own_s


async def unary(
    method: Callable[..., Any],
    request: Any,
    *,
    timeout_s: float,
    budget: RetryBudget | None = None,
    wait_for_ready: bool = False,
) -> Any:
    """Call a unary (or client-streaming, with a repeatable request) method of a stub. Raises QuartetError.

    `budget` None: once.
    """
    deadline = time.monotonic() + (request_context.bounded(timeout_s) or 0.0)
    attempt = 0
    while True:
        attempt += 1
        timeout_s = max(0.001, deadline - time.monotonic())
        call = method(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        told = [] if isinstance(request, Message) else _told(call)
        try:
            return await call
        except grpc.RpcError as error:
            failure = _as_told(error, told)
        if failure.reason not in RETRYABLE or budget is None or attempt >= budget.max_attempts:
            raise failure
        delay_s = budget.delay_s(attempt, failure)
        if time.monotonic() + delay_s >= deadline:
            raise failure  # the last failure says more than the deadline would
        await asyncio.sleep(delay_s)


async def stream(call: Any, *, idle_timeout_s: float, sends: bool = False) -> AsyncIterator[Any]:
    """The responses of a streaming call. Raises QuartetError; DEADLINE when the peer falls silent.

    `sends`: its requests are a stream, too.
    """
    told = _told(call) if sends else []
    try:
        while True:
            try:
                response = await _read(call, idle_timeout_s)
            except TimeoutError:
                raise QuartetError(
                    "DEADLINE", f"the stream was silent for {idle_timeout_s:g} s", waited_for="next message"
                ) from None
            except grpc.RpcError as error:
                raise _as_told(error, told) from None
            if response is grpc.aio.EOF:
                return
            yield response
    finally:
        call.cancel()


async def _read(call: Any, idle_timeout_s: float) -> Any:
    """The next message. Raises TimeoutError where none came for so long by the clock of awake.py."""
    loop, since = asyncio.get_running_loop(), awake_s()
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal timer
        left_s = idle_timeout_s - (awake_s() - since)
        if left_s > 0:
            timer = loop.call_later(left_s, look)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(idle_timeout_s, look)
        try:
            return await call.read()
        finally:
            timer.cancel()


def _told(call: Any) -> list[grpc.aio.AioRpcError]:
    """What it ends with, once it is told."""
    told: list[grpc.aio.AioRpcError] = []
    call.add_done_callback(lambda ended: told.append(_ending(ended)))
    return told


def _as_told(error: grpc.RpcError, told: Sequence[grpc.aio.AioRpcError]) -> QuartetError:
    return from_rpc(told[0] if told and error.details() == LOST_STATUS else error)


def _ending(ended: Any) -> grpc.aio.AioRpcError:
    """The status of a call that is done, as it is at this moment."""
    code, trailers, details = map(_at_once, (ended.code(), ended.trailing_metadata(), ended.details()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details)


def _at_once(known: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        known.send(None)
    except StopIteration as result:
        return result.value
    raise AssertionError("the status of a call that is done is there")
