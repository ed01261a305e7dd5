"""What runs in a vLLM engine, by which weights, what is said of it, and how it ends: what the parts of the
engine share.

1. A request that is stopped is told why, and leaves vLLM with its task.
2. Once the engine is closed it never opens again, and nothing that ran is left without an answer; neither is
   whoever has asked a core for something, once the cores have ended.
3. Whoever changes weights, adapters or the pause holds `changing` meanwhile, and is not interrupted.
4. At most `max_waiting` completions and scores wait; one more is OVERLOADED.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import structlog
from quartet.errors import QuartetError
from quartet.kit.shielded import shielded
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from quartet_inference.engine import (
    EngineInfo,
    Request,
    ScoreRequest,
    ServedWeights,
    not_ready,
    refusal,
)
from quartet_inference.room import check_room
from quartet_inference.vllm import faults
from quartet_inference.vllm.flight import Flight, ServedAdapter

T = TypeVar("T")

log = structlog.get_logger()


class Running:
    """The only one that holds AsyncLLM for longer than a request: what closes the engine lets it go here."""

    def __init__(
        self, llm: AsyncLLM, info: EngineInfo, max_waiting: int, on_step: Callable[[], None]
    ) -> None:
        """Nothing runs yet. `on_step` is called whenever vLLM has answered."""
        self.llm = llm
        self.info = info
        self.on_step = on_step
        self.epoch = 0  # of the weights
        self.flights: dict[Flight, None] = {}
        self.started = 0  # of the flights
        self.asking = 0  # changes, and what else the cores are asked for besides tokens
        self.tasks: set[asyncio.Task[Any]] = set()
        self._scores: set[asyncio.Task[Any]] = set()
        self._max_waiting = max_waiting
        self.changing = asyncio.Lock()

    @property
    def salt(self) -> str:
        """Of the cache: no prefix of older weights serves a request that has it."""
        return f"weights-{self.epoch}"

    def admit(self, request: Request | ScoreRequest, count: int) -> None:
        """Whether so many more of it may wait; none: it does not wait. Errors: NOT_READY, OVERLOADED, and
        those of `refusal`."""
        self.check_open()
        refused = refusal(request, self.info.serving(request.run_id))
        if refused is not None:
            raise refused
        waiting = len(self.flights) - self.started + len(self._scores)
        if count:
            check_room(waiting, count, self._max_waiting)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Begin work that the end of the engine waits for."""
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def to_the_end(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """The result of work that goes on where its caller leaves. Errors: NOT_READY once the core has ended,
        and those of the work.

        Half of it would leave the core in a state that nobody knows of.
        """
        return await shielded(self.spawn(self.asked(self.of_core(work)), name))

    async def asked(self, answer: Awaitable[T]) -> T:
        """What the cores are asked for besides tokens: counted while it is under way."""
        self.asking += 1
        try:
            return await answer
        finally:
            self.asking -= 1

    async def score(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that ends with the engine. Errors: NOT_READY, and those of the work."""
        task = self.spawn(work, "vllm-score")
        self._scores.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise not_ready() from None  # nobody else cancels it
        finally:
            self._scores.discard(task)

    def stop(self, flight: Flight, error: QuartetError | None = None) -> None:
        """Take a completion out, with an error where its caller still listens."""
        self.leave(flight)
        if error is not None:
            flight.events.put_nowait(error)
        if flight.task is not None:
            flight.task.cancel()

    def leave(self, flight: Flight) -> None:
        """It runs no more. Idempotent."""
        if flight in self.flights:
            del self.flights[flight]
            self.started -= flight.started

    def end_pinned(self, weights: ServedWeights, adapter: ServedAdapter | None = None) -> None:
        """What is answered by this adapter, or by the base model, and refuses these weights ends."""
        for flight in [flight for flight in self.flights if flight.adapter is adapter]:
            refused = refusal(flight.request, weights)
            if refused is not None:
                self.stop(flight, refused)

    def sampled(self, flight: Flight, tokens: int) -> None:
        """Count tokens of a completion, and with the first of them the completion."""
        if tokens and not flight.started:
            flight.started = True
            self.started += flight in self.flights
        self.info = replace(self.info, tokens_sampled=self.info.tokens_sampled + tokens)

    def updated(self, began: float) -> None:
        """Count a change of weights that has held decoding up since then."""
        self.info = replace(
            self.info,
            updates_applied=self.info.updates_applied + 1,
            last_update_pause_ms=(time.perf_counter() - began) * 1000,
        )

    def check_open(self) -> None:
        """Errors: NOT_READY."""
        if self.info.closed:
            raise not_ready()

    def die(self, why: str) -> None:
        """Never answer again, and say why; what still runs fails."""
        if not self.info.closed:
            log.error("engine ended", why=why)
            self.info = replace(self.info, ended=why)
        self.close()

    def core_ended(self) -> None:
        """vLLM's core answers nothing any more."""
        if self.info.closed:
            return
        why = faults.first()
        self.die(f"vLLM's core has ended: {why}" if why else "vLLM's core has ended")
        self.answer_for_cores()

    def answer_for_cores(self) -> None:
        """Fail what was asked of cores that have ended: vLLM leaves whoever waits for them waiting."""
        for answer in list(self.llm.engine_core.utility_results.values()):
            if not answer.done():
                answer.set_exception(EngineDeadError())

    async def of_core(self, answer: Awaitable[T]) -> T:
        """What a core answers. Errors: NOT_READY once it has ended, and those of the answer."""
        try:
            return await answer
        except EngineDeadError:
            self.core_ended()
            raise not_ready() from None

    def look(self) -> None:
        """Notice the end of vLLM's core, which it tells nobody who asks for nothing."""
        if not self.info.closed and self.llm.errored:
            self.core_ended()

    def close(self) -> None:
        """What still runs fails with NOT_READY."""
        self.info = replace(self.info, closed=True)
        for flight in list(self.flights):
            self.stop(flight, not_ready())
        for score in self._scores:
            score.cancel()
