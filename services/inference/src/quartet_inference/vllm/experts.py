"""The experts that took a completion's tokens: from the workers, which note them, into its events.

1. They are told once, of the completion's last submission and of those before it: where it is submitted again
   with the tokens that it has, the experts of these are those that were noted first (`noting` 3).
2. However a submission ends, the workers forget it once it has left vLLM.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
from quartet.errors import QuartetError
from quartet.kit.fresh import fresh_id
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from quartet_inference.engine import Experts, Routed
from quartet_inference.vllm.asked import KEY
from quartet_inference.vllm.flight import Flight, Submission
from quartet_inference.vllm.running import Running
from quartet_inference.vllm.workers import Workers


class RoutedExperts:
    """Of a model that has so many routers."""

    def __init__(self, running: Running, workers: Workers, routers: int) -> None:
        """The workers of a started engine."""
        self._running = running
        self._workers = workers
        self._routers = routers
        self._left: list[str] = []

    @asynccontextmanager
    async def asked(self, flight: Flight) -> AsyncIterator[None]:
        """One submission of a flight; when this is left, it has left vLLM."""
        if flight.request.experts_from is None:
            yield
            return
        name = flight.noted_as = fresh_id()
        try:
            yield
        finally:
            self._forget_soon(name)

    def _forget_soon(self, name: str) -> None:
        self._left.append(name)
        if len(self._left) == 1 and not self._running.info.closed:
            self._running.spawn(self._forget(), "vllm-forget")

    async def _forget(self) -> None:
        left, self._left = self._left, []
        try:
            await self._workers.forget(left)
        except EngineDeadError:
            self._running.core_ended()

    async def tell(self, flight: Flight) -> None:
        """All of a completion that has ended, where it asks. Errors: INTERNAL."""
        start = flight.request.experts_from
        if start is not None:
            await self.take(flight)
            flight.events.put_nowait(Routed(flight.completion.index, start, np.concatenate(flight.experts)))

    async def of_prompt(self, tokens: Sequence[int], salt: str) -> Experts | None:
        """Those that take these tokens now, whoever is served; None where they are not noted."""
        name = fresh_id()
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=0, detokenize=False, extra_args={KEY: (name, 0)}
        )
        try:
            async with Submission(self._running.llm, name, lambda: None) as submission:
                await submission.submit(tokens, salt, params)
                await submission.next()
                return await self._workers.experts(name, 0, len(tokens))
        finally:
            self._forget_soon(name)

    async def take(self, flight: Flight) -> None:
        """Those of the tokens that a flight has, but for its last one. Errors: INTERNAL."""
        if flight.request.experts_from is None or not flight.started:
            return  # of what nothing was drawn behind, the next submission tells
        end = flight.tokens - 1
        while not flight.experts or flight.experts_end < end:
            before = flight.experts_end
            part = await self._workers.experts(flight.noted_as, before, end)
            if part is None or part.shape[1] != self._routers or not len(part) >= min(1, end - before):
                raise QuartetError("INTERNAL", "vLLM's workers have not noted the experts of all tokens")
            flight.experts.append(part)
