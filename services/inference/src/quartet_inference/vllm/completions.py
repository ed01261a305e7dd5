"""Completions in a vLLM engine: of each a flight of its own, from its prompt to its finish.

1. Who leaves takes the completions that were asked for along.
2. What goes wrong with one is told to its caller; non-finite logits have the keys behind them wiped, too, and
   that vLLM's core has ended is told to all.
3. One that new weights overtake before its first token is submitted again (`flight` 2).
4. Of one that asks for them, the experts that took its tokens are told before its end (`experts`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import numpy as np
import structlog
from quartet.errors import QuartetError
from quartet.kit.fresh import fresh_id
from vllm.v1.engine.exceptions import EngineDeadError

from quartet_inference.completion import Completion
from quartet_inference.engine import Event, Finish, NonFiniteLogits, Request, Stamp
from quartet_inference.sampler import seeds_of
from quartet_inference.stop_strings import watch
from quartet_inference.vllm.adapters import Adapters
from quartet_inference.vllm.checkpoint import Held
from quartet_inference.vllm.experts import RoutedExperts
from quartet_inference.vllm.flight import Flight, Moved, Submission
from quartet_inference.vllm.running import Running
from quartet_inference.vllm.workers import Workers

log = structlog.get_logger()


class Completions:
    """By the weights and adapters of a started engine."""

    def __init__(
        self,
        running: Running,
        workers: Workers,
        experts: RoutedExperts,
        adapters: Adapters,
        held: Held,
        on_step: Callable[[], None],
    ) -> None:
        """`on_step` is called whenever vLLM has answered."""
        self._running = running
        self._workers = workers
        self._experts = experts
        self._adapters = adapters
        self._held = held
        self._on_step = on_step
        self._first = held.served.stamp if held.served else Stamp(0)
        self._random = np.random.default_rng()

    async def of(self, request: Request) -> AsyncIterator[Event]:
        """Complete a prompt. Errors: those of `Engine.generate`."""
        self._running.admit(request, request.n)
        # At most what one request's tokens make: whoever reads it is its only caller.
        events: asyncio.Queue[Event | QuartetError] = asyncio.Queue()
        seeds = enumerate(seeds_of(request, self._random))
        flights = [self._start(request, *one, events) for one in seeds]
        unfinished = request.n
        try:
            while unfinished:
                event = await events.get()
                if isinstance(event, QuartetError):
                    raise event
                unfinished -= isinstance(event, Finish)
                yield event
        finally:
            for flight in flights:
                self._running.stop(flight)

    def _start(
        self, request: Request, index: int, seed: int, events: asyncio.Queue[Event | QuartetError]
    ) -> Flight:
        stops = watch(request.sampling, self._held.detokenize)
        completion = Completion(request, index, seed, self._held.end_tokens, stops)
        adapter = self._adapters.get(request.run_id)
        flight = Flight(request, completion, events, self._first, adapter)
        if completion.finish is not None:  # it ended where it ran before
            events.put_nowait(completion.finish)
            return flight
        self._running.flights[flight] = None
        flight.task = self._running.spawn(self._fly(flight), "vllm-completion")
        return flight

    async def _fly(self, flight: Flight) -> None:
        try:
            while not await self._attempt(flight):
                log.debug("submitted again under new weights")
        except NonFiniteLogits as error:
            flight.events.put_nowait(error)
            self._workers.spoiled()
        except QuartetError as error:
            flight.events.put_nowait(error)
        except EngineDeadError:
            self._running.core_ended()
        except Exception:
            log.exception("a completion failed in vLLM")
            flight.events.put_nowait(QuartetError("INTERNAL", "vLLM failed this request"))
        finally:
            self._running.leave(flight)

    async def _attempt(self, flight: Flight) -> bool:
        """Submit a completion and follow it; False where new weights came before its first token."""
        flight.again = False
        async with (
            self._experts.asked(flight),
            self._adapters.using(flight.adapter) as lora,
            Submission(self._running.llm, fresh_id(), self._on_step) as submission,
        ):
            flight.submission = submission
            params = flight.params(self._running.info)
            await submission.submit(flight.prompt(), self._running.salt, params, lora)
            while True:
                with suppress(Moved):  # which sets `again`
                    output = await submission.next()
                if flight.again:
                    await self._experts.take(flight)
                    return False
                self._running.sampled(flight, flight.take(output, submission.starts(output)))
                if flight.completion.finish is not None:
                    await self._experts.tell(flight)
                    flight.events.put_nowait(flight.completion.finish)
                    return True
                if output.finished:
                    raise _ended_by_vllm(output.outputs[0].finish_reason)


def _ended_by_vllm(why: str | None) -> QuartetError:
    """Of a completion that nobody stopped here: its core ends, or another one that shares its work."""
    log.warning("vLLM ended a completion", finish_reason=why)
    return QuartetError("NOT_READY", f"vLLM ended this request ({why}), as cores do that stop; send it again")
