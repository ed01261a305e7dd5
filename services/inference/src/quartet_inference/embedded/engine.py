"""The embedded engine: the event loop's side of a thread that decodes.

1. Everything about rows, keys and weights happens in the decoding thread (decoder.py); the event loop only
   posts commands, which run between two decode steps, and receives events.
2. At most `max_waiting` completions wait; more are refused with OVERLOADED. A stream's buffer is bounded by
   its own max_tokens.
3. A request whose iterator is closed has left the batch before the next step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeVar

from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor
from torch import nn

from quartet_inference.embedded import model
from quartet_inference.embedded.commands import Commands
from quartet_inference.embedded.decoder import Decoder
from quartet_inference.embedded.device import within_memory
from quartet_inference.embedded.limits import Limits
from quartet_inference.embedded.lora import Matrices
from quartet_inference.embedded.score import ScoreJob
from quartet_inference.embedded.tickets import Ticket
from quartet_inference.engine import EngineInfo, Event, Finish, Request, Scored, ScoreRequest, ServedWeights
from quartet_inference.layout import Layout
from quartet_inference.lora import read_adapter
from quartet_inference.text_stream import Detokenize

T = TypeVar("T")

#: The step that is under way ends within.
CLOSE_SECONDS = 30.0


class EmbeddedEngine:
    """Continuous batching over a transformers model; implements `quartet_inference.engine.Engine`."""

    def __init__(
        self,
        network: nn.Module,
        limits: Limits,
        end_tokens: frozenset[int],
        detokenize: Detokenize,
        served: ServedWeights | None,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over a loaded model. `served` names its weights; None: unverified, nothing is generated."""
        self._weight = next(network.parameters())
        self._commands = Commands(limits.max_waiting)
        self._decoder = Decoder(network, limits, end_tokens, detokenize, served, on_step, self._commands)
        self._thread = threading.Thread(target=self._decoder.run, name="decode", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """Complete a prompt."""
        ticket = Ticket(request, asyncio.get_running_loop())
        self._commands.admit(request.n, lambda: self._decoder.enqueue(ticket))
        unfinished = request.n
        try:
            while unfinished:
                event = await ticket.events.get()
                if isinstance(event, QuartetError):
                    raise event
                unfinished -= isinstance(event, Finish)
                yield event
        finally:
            self._commands.post(lambda: self._decoder.requests.drop(ticket))

    async def score(self, request: ScoreRequest) -> Scored:
        """Log-probabilities of given tokens."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Scored] = loop.create_future()

        def receive(outcome: Scored | QuartetError) -> None:
            if answer.done():
                return
            if isinstance(outcome, Scored):
                answer.set_result(outcome)
            else:
                answer.set_exception(outcome)

        def settle(outcome: Scored | QuartetError) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(receive, outcome)

        job = ScoreJob(request, settle)
        self._commands.submit(lambda: self._decoder.enqueue_score(job))
        try:
            return await answer
        finally:
            self._commands.post(lambda: self._decoder.drop_score(job))

    async def pause(self) -> int:
        """Decode no further after the current step."""
        return await self._call(lambda: self._decoder.set_paused(True))

    async def resume(self) -> int:
        """Go on."""
        return await self._call(lambda: self._decoder.set_paused(False))

    def layout(self) -> Layout:
        """What a version must consist of."""
        return self._decoder.swaps.weights.layout()

    async def stage(self, tensors: Mapping[str, Tensor]) -> model.StagedWeights:
        """Check a version against the model."""
        return await asyncio.to_thread(within_memory, lambda: self._decoder.swaps.weights.stage(tensors))

    async def swap(self, staged: model.StagedWeights | None, weights: ServedWeights) -> None:
        """Serve staged weights, or the ones held, under a name."""
        await self._call(lambda: self._decoder.swaps.swap(staged, weights))

    async def stage_adapter(self, config_json: str, tensors: Mapping[str, Tensor]) -> Matrices:
        """Check an adapter against the model."""

        def stage() -> Matrices:
            adapter = read_adapter(config_json, tensors, self._decoder.swaps.weights.layout())
            return Matrices.of(adapter, self._weight)

        return await asyncio.to_thread(within_memory, stage)

    async def swap_adapter(self, staged: Matrices | None, weights: ServedWeights) -> None:
        """Serve a staged adapter, or the one held, under a name."""
        await self._call(lambda: self._decoder.swaps.swap_adapter(staged, weights))

    async def drop_adapter(self, run_id: str, why: QuartetError) -> None:
        """Serve it no more."""
        await self._call(lambda: self._decoder.swaps.drop_adapter(run_id, why))

    def base_digest(self) -> bytes:
        """Digest of the weights at the start."""
        return self._decoder.swaps.base_digest

    def info(self) -> EngineInfo:
        """A snapshot."""
        return self._decoder.info

    async def close(self) -> None:
        """Stop the thread; what still runs fails with NOT_READY. A thread that hangs is left to itself."""
        self._commands.end()
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)

    async def _call(self, command: Callable[[], T]) -> T:
        def run() -> T:
            self._decoder.note(asked=True)  # where it hangs, the replica is not alive, whoever waits for it
            result = command()
            self._decoder.note()  # whoever awaits the answer sees the state after it
            return result

        return await self._commands.call(run)
