"""Health that means progress, not that a port answers (grpc.health.v1).

1. Keys: each service by its full name; "" is ready when all of them are; "liveness" is about the process.
2. A service is NOT_SERVING until `set_ready`, and all of them are while the process drains.
3. "liveness" fails while the event loop runs timers too late, or while work is under way that makes no
   progress. It does not fail because a service is not ready: restarting a process that loads weights does
   not make it load them faster.
4. `progress` and the setters may be called from any thread.
5. Whoever asks needs no token, so those who watch are bounded in number (MAX_WATCHERS). A server that stops
   does not wait for them: they are told how it stands, and that is the end of their stream.
6. An answer to Check tells which code the process runs (quartet.kit.build).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quartet.errors import QuartetError
from quartet.kit.build import METADATA_KEY, Build
from quartet.kit.metrics import LOOP_LAG
from quartet.kit.own_log import get_logger

LIVENESS: Final = "liveness"
WATCHDOG_SECONDS: Final = 0.5
# A loop this late cannot answer calls in time either; a long garbage collection or a page-in stays below it.
LOOP_LAG_LIMIT_SECONDS: Final = 5.0

#: At once. Kubernetes asks anew each time; a balancer that watches has one stream.
MAX_WATCHERS: Final = 256

_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

log = get_logger()


class Health:
    """The state of one process and of the services in it."""

    def __init__(self, *, is_told: bool = True) -> None:
        """Nothing is registered, nothing is ready. `is_told`: whether the log has it where liveness changes;
        of a program that sleeps with its machine nobody has to know."""
        self._is_told = is_told
        self._why_not: dict[str, str] = {}  # service -> why it is not ready; "" when it is
        self._progress_at = time.monotonic()
        self._watches: list[tuple[Callable[[], float], Callable[[], bool]]] = []
        self._lag_s = 0.0
        self.draining = asyncio.Event()

    def register(self, names: Iterable[str]) -> None:
        """Make services known, as not ready unless they already said that they are."""
        for name in names:
            self._why_not.setdefault(name, "starting")

    @property
    def keys(self) -> Sequence[str]:
        """That there is an answer for."""
        return ("", LIVENESS, *self._why_not)

    def set_ready(self, service_name: str) -> None:
        """The service can do its work."""
        self._change(service_name, "")

    def set_not_ready(self, service_name: str, why: str) -> None:
        """The service cannot do its work now, and why."""
        self._change(service_name, why or "not ready")

    def progress(self) -> None:
        """Called by the work loop whenever it got something done."""
        self._progress_at = time.monotonic()

    def watch_progress(self, limit_s: float | Callable[[], float], busy: Callable[[], bool]) -> None:
        """Fail liveness when `busy()` and no progress for `limit_s`. Time spent idle does not count.

        A limit that depends on what is under way is asked for anew each time; where it falls, say `progress`.
        """
        self.progress()
        self._watches.append((limit_s if callable(limit_s) else lambda: limit_s, busy))

    def drain(self) -> None:
        """The process is about to stop: nothing is ready any more, for good."""
        self.draining.set()

    def why_not(self, service_name: str = "") -> str:
        """Why a key is not serving; "" when it is. Raises KeyError for an unknown key."""
        if service_name == LIVENESS:
            return self._why_not_alive()
        if self.draining.is_set():
            return "draining"
        if service_name:
            return self._why_not[service_name]
        return next((f"{name}: {why}" for name, why in self._why_not.items() if why), "")

    async def watchdog(self) -> None:
        """Measure the loop's lag for ever; idle time is taken off the progress clock here."""
        alive = True
        while True:
            began = time.monotonic()
            await asyncio.sleep(WATCHDOG_SECONDS)
            self._lag_s = max(0.0, time.monotonic() - began - WATCHDOG_SECONDS)
            LOOP_LAG.set(self._lag_s)
            if not any(busy() for _limit_s, busy in self._watches):
                self.progress()
            why = self._why_not_alive()
            if alive == bool(why):
                alive = not why
                if self._is_told:
                    (log.info if alive else log.error)("liveness changed", alive=alive, why=why)

    def _why_not_alive(self) -> str:
        if self._lag_s > LOOP_LAG_LIMIT_SECONDS:
            return f"the event loop is {self._lag_s:.1f} s late"
        idle_s = time.monotonic() - self._progress_at
        for limit_s, busy in self._watches:
            if busy() and idle_s > (limit := limit_s()):
                return f"no progress for {idle_s:.1f} s (limit {limit:g} s)"
        return ""

    def _change(self, service_name: str, why: str) -> None:
        if self._why_not.get(service_name) != why:
            log.info("readiness changed", target=service_name, ready=not why, why=why)
        self._why_not[service_name] = why


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1 over a Health."""

    def __init__(self, health: Health, build: Build) -> None:
        """Serve `health` of a process that runs `build`."""
        self._health = health
        self._build = ((METADATA_KEY, build.text),)
        self._watchers = 0
        self._is_closed = False

    def close(self) -> None:
        """Watch nothing any more: clients of a service watch it for as long as they live."""
        self._is_closed = True

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """The status of one key; NOT_FOUND for an unknown one."""
        status = self._status(request.service)
        context.set_trailing_metadata(self._build)
        if status == _SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """The status of every key; build as of Check."""
        context.set_trailing_metadata(self._build)
        told = {key: health_pb2.HealthCheckResponse(status=self._status(key)) for key in self._health.keys}
        return health_pb2.HealthListResponse(statuses=told)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """The status of one key, now and on every change. Errors: OVERLOADED."""
        if self._watchers >= MAX_WATCHERS:
            raise QuartetError("OVERLOADED", f"{self._watchers} watch already; ask by Check")
        self._watchers += 1
        try:
            async for response in self._changes(request.service):
                yield response
        finally:
            self._watchers -= 1

    async def _changes(self, key: str) -> AsyncIterator[Any]:
        told = None
        while True:
            is_last = self._is_closed  # before the status is: while that is sent, both may change
            status = self._status(key)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            if is_last:
                return
            # Polled, because liveness changes by the passing of time and readiness from any thread.
            await asyncio.sleep(WATCHDOG_SECONDS)

    def _status(self, key: str) -> int:
        try:
            return int(_NOT_SERVING if self._health.why_not(key) else _SERVING)
        except KeyError:
            return int(_SERVICE_UNKNOWN)
