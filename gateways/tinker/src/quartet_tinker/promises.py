"""Answers that come later: every long request is a promise, fetched by its id.

1. An id is made from what the request is (its model and number), never drawn: a request that is repeated
   finds the promise of its first arrival, and is not done again. With other contents it is refused.
2. A result is kept for KEEP_SECONDS after it came, and no longer than until MAX_PROMISES younger ones or
   MAX_BYTES of results need the place; promises without a result are never forgotten.
3. Whatever a piece of work raises becomes the answer of its promise.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog
import xxhash
from quartet.errors import QuartetError
from quartet.kit import tracing

from quartet_tinker.refusal import Refused, from_quartet

#: The SDK fetches a result as soon as it is there; a laptop may sleep in between.
KEEP_SECONDS = 3600.0
MAX_PROMISES = 65_536
MAX_BYTES = 256 * 2**20
JSON, PROTO = "application/json", "application/x-protobuf"

log = structlog.get_logger()


@dataclass(frozen=True)
class Answer:
    """A body as the SDK reads it."""

    body: bytes
    content_type: str = JSON


@dataclass
class Promise:
    """One request and, when it is done, its answer."""

    request_id: str
    contents: bytes
    session_id: str
    answer: Answer | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    settled_at: float = 0.0
    task: asyncio.Task[None] | None = None
    #: Where it was given: the request is over when the work begins, which may be in a task of another one.
    place: tracing.Place = field(default_factory=tracing.here)
    on_settled: Callable[[Promise], None] = lambda promise: None
    at_end: Callable[[], None] = lambda: None

    def settle(self, answer: Answer) -> None:
        """The answer; the first one counts."""
        if self.answer is None:
            self.answer, self.settled_at = answer, time.monotonic()
            self.done.set()
            self.on_settled(self)
            self.at_end()


def answered(**values: Any) -> Answer:
    """A result in JSON."""
    return Answer(json.dumps(values).encode())


def failed(refused: Refused) -> Answer:
    """A failure in JSON."""
    return Answer(json.dumps({"error": refused.sentence, "category": refused.category}).encode())


class Promises:
    """All of them. For one event loop."""

    def __init__(self) -> None:
        self._by_id: dict[str, Promise] = {}
        self._settled: deque[Promise] = deque()
        self._bytes = 0

    def find(self, request_id: str) -> Promise | None:
        """A promise that is still kept."""
        return self._by_id.get(request_id)

    def make(self, request_id: str, body: bytes, session_id: str) -> tuple[Promise, bool]:
        """The promise of this request, and whether it is new. Raises Refused."""
        contents = bytes(xxhash.xxh3_128_digest(body))
        found = self._by_id.get(request_id)
        if found is not None:
            if found.contents != contents:
                raise Refused(f"request {request_id} came before with other contents; it is not done again")
            return found, False
        self._forget()
        if len(self._by_id) >= MAX_PROMISES:
            raise Refused(f"{MAX_PROMISES} requests are under way; send fewer at once", status=429)
        promise = self._by_id[request_id] = Promise(request_id, contents, session_id, on_settled=self._keep)
        return promise, True

    def begin(
        self, request_id: str, body: bytes, session_id: str, work: Coroutine[Any, Any, Answer]
    ) -> Promise:
        """The promise of this request; where it is new, the work begins in the background. Raises Refused."""
        try:
            promise, is_new = self.make(request_id, body, session_id)
        except Refused:
            work.close()
            raise
        if is_new:
            promise.task = asyncio.create_task(fulfil(promise, work), name=promise.request_id)
        else:
            work.close()
        return promise

    def drop(self, promise: Promise) -> None:
        """Forget a promise whose request was not taken after all."""
        del self._by_id[promise.request_id]

    def fail(self, session_id: str, refused: Refused) -> None:
        """Nothing of this session will be answered any more."""
        for promise in self._by_id.values():
            if promise.session_id == session_id and promise.answer is None:
                promise.settle(failed(refused))
                if promise.task is not None:
                    promise.task.cancel()

    async def close(self) -> None:
        """End what is under way; what was ended before may take its time to clean up."""
        under_way = [
            (one, one.task) for one in self._by_id.values() if one.task is not None and not one.task.done()
        ]
        for promise, task in under_way:
            if promise.answer is None:
                task.cancel()
        await asyncio.gather(*(task for _, task in under_way), return_exceptions=True)

    def _keep(self, promise: Promise) -> None:
        assert promise.answer is not None, "it is settled"
        self._settled.append(promise)
        self._bytes += len(promise.answer.body)

    def _forget(self) -> None:
        too_old = time.monotonic() - KEEP_SECONDS
        while self._settled and (
            self._settled[0].settled_at < too_old
            or len(self._by_id) >= MAX_PROMISES
            or self._bytes > MAX_BYTES
        ):
            oldest = self._settled.popleft()
            assert oldest.answer is not None, "it is settled"
            self._bytes -= len(oldest.answer.body)
            del self._by_id[oldest.request_id]


async def fulfil(promise: Promise, work: Coroutine[Any, Any, Answer]) -> None:
    """Do the work; its result, or why there is none, is the answer."""
    with tracing.span("promise", within=promise.place, request_id=promise.request_id) as span:
        try:
            promise.settle(await work)
        except asyncio.CancelledError:
            promise.settle(failed(Refused("the request was cancelled", category="server")))
            raise
        except (Refused, QuartetError) as error:
            refused = error if isinstance(error, Refused) else from_quartet(error)
            span.fail(refused.sentence)
            promise.settle(failed(refused))
        except Exception:
            # A fault of the gateway: its details stay in the log.
            log.exception("request failed", request_id=promise.request_id)
            span.fail("fault")
            promise.settle(failed(Refused("the gateway failed; its log says why", category="server")))
