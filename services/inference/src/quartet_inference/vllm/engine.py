"""The vLLM engine: AsyncLLM in this process, its cores and workers in their own.

1. Everything here happens in one event loop; what is not awaited is atomic.
2. A swap is: pause, load in every worker, label, resume. It is not interrupted: between load and label
   nothing is sampled. A load that fails before it touches the model leaves the old weights serving, their
   adapters and whoever is pinned to them included; one that fails later ends the engine, which says so.
3. In `recompute` vLLM drops the keys of running requests and all prefixes; in `keep` running requests keep
   theirs. In both, new requests carry another cache salt, so that no prefix of older weights serves them.
4. Keys that broken weights have left non-finite would spoil whoever gets their place in the cache, masked or
   not: they are wiped, and running requests recomputed, before anything goes on.
5. A request that is pinned to a run or version ends in the pause in which the weights leave it, also where
   it came in that pause.
6. Adapters go with the weights that they were made for (`adapters`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor
from vllm.v1.engine.async_llm import AsyncLLM

from quartet_inference.engine import (
    EngineInfo,
    Event,
    Experts,
    Request,
    Scored,
    ScoreRequest,
    ServedWeights,
)
from quartet_inference.held import check_name
from quartet_inference.layout import Layout, check_layout, layout_of
from quartet_inference.vllm.adapters import Adapters
from quartet_inference.vllm.checkpoint import Held
from quartet_inference.vllm.completions import Completions
from quartet_inference.vllm.experts import RoutedExperts
from quartet_inference.vllm.flight import label_of
from quartet_inference.vllm.running import Running
from quartet_inference.vllm.scoring import Scoring
from quartet_inference.vllm.staging import StagedAdapter, StagedFile, Staging
from quartet_inference.vllm.workers import Workers

#: What is under way gets so long to end, and then vLLM's processes; they have nothing to save.
CLOSE_SECONDS = 1.0


class VllmEngine:
    """Implements `quartet_inference.engine.Engine`."""

    def __init__(
        self,
        llm: AsyncLLM,
        held: Held,
        staging: Staging,
        max_waiting: int,
        recompute_on_update: bool,
        on_step: Callable[[], None] = lambda: None,
        max_adapters: int = 16,
    ) -> None:
        """Take over a started AsyncLLM."""
        model = llm.model_config
        self._held = held
        self._staging = staging
        self._recompute = recompute_on_update
        info = EngineInfo(
            "vllm", str(model.dtype).removeprefix("torch."), model.max_model_len,
            llm.vllm_config.scheduler_config.max_num_seqs, model.get_vocab_size(),
            tuple(sorted(held.end_tokens)), held.served, 0, 0, 0, 0, 0.0, False,
            routers=held.routers,
        )  # fmt: skip
        self._running = running = Running(llm, info, max_waiting, on_step)
        self._workers = workers = Workers(running)
        self._adapters = adapters = Adapters(
            running, workers, staging, held.layout, held.digest, max_adapters
        )
        experts = RoutedExperts(running, workers, held.routers)
        self._completions = Completions(running, workers, experts, adapters, held, on_step)
        self._scoring = Scoring(running, workers, experts, adapters, on_step)

    # ---- requests (`completions`, `scoring`)

    def generate(self, request: Request) -> AsyncIterator[Event]:
        """Complete a prompt."""
        return self._completions.of(request)

    async def score(self, request: ScoreRequest) -> Scored:
        """Score a sequence; a swap starts it anew."""
        return await self._scoring.of(request)

    async def score_unnamed(self, request: ScoreRequest) -> list[float]:
        """What the weights inside say, whatever they are called. Errors: INTERNAL, NOT_READY."""
        return await self._scoring.unnamed(request)

    async def experts_unnamed(self, tokens: Sequence[int]) -> Experts | None:
        """Those that take these tokens; None where the workers do not know. Errors: NOT_READY."""
        return await self._scoring.experts_unnamed(tokens)

    # ---- pause and weights

    async def pause(self) -> int:
        """Decode no further after the current step."""
        self._running.check_open()
        return await self._running.to_the_end(self._set_paused(True), "vllm-pause")

    async def resume(self) -> int:
        """Go on."""
        self._running.check_open()
        return await self._running.to_the_end(self._set_paused(False), "vllm-resume")

    async def _set_paused(self, paused: bool) -> int:
        async with self._running.changing:
            self._running.check_open()
            core = self._running.llm.engine_core
            if paused:
                await core.pause_scheduler_async(mode="keep", clear_cache=False)
            else:
                await core.resume_scheduler_async()
            self._running.info = replace(self._running.info, paused=paused)
        return len(self._running.flights)

    def layout(self) -> Layout:
        """What a version must consist of."""
        return self._held.layout

    async def stage(self, tensors: Mapping[str, Tensor]) -> StagedFile:
        """Check a version against the model and lay it where the workers find it."""
        check_layout(layout_of(tensors), self._held.layout)
        staged = await asyncio.to_thread(lambda: self._staging.write(self._held.checkpoint.tensors(tensors)))
        self._running.check_open()
        await self._workers.prepare(staged)
        return staged

    async def swap(self, staged: StagedFile | None, weights: ServedWeights) -> None:
        """Serve staged weights, or the ones held, under a name."""
        self._running.check_open()
        # Half a swap would stamp tokens with a version that did not sample them.
        await self._running.to_the_end(self._swap(staged, weights), "vllm-swap")

    async def load_again(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the weights of the start once more, as an update that nobody sees. Errors: those of `swap`."""
        info = self._running.info
        await self.swap(await self.stage(tensors), ServedWeights("", 0, self._held.digest))
        self._running.info = replace(info, closed=self._running.info.closed)

    async def _swap(self, staged: StagedFile | None, weights: ServedWeights) -> None:
        async with self._running.changing:
            self._running.check_open()
            if staged is None:
                check_name(weights, self._running.info.served, self._held.digest)
                label = label_of(weights.stamp)
                await self._name(weights, self._running.llm.update_weight_version(label))
                return
            core = self._running.llm.engine_core
            # Of the core, not of AsyncLLM: that one sleeps for 20 ms after every pause.
            await core.pause_scheduler_async(mode="keep", clear_cache=self._recompute)
            began = time.perf_counter()  # before that, the step that was under way went on sampling
            try:
                await self._workers.load(staged)
                self._adapters.retire_all()
                await self._name(weights, self._workers.label(weights))
                self._running.epoch += 1
                if not self._recompute:
                    for flight in self._running.flights:
                        flight.again = not flight.started
            finally:
                if not self._running.info.paused and not self._running.info.closed:
                    await core.resume_scheduler_async()
            self._running.updated(began)

    async def _name(self, weights: ServedWeights, label: Awaitable[None]) -> None:
        self._running.end_pinned(weights)  # they have left vLLM before anything is sampled under the new name
        await label
        self._running.end_pinned(weights)  # who came meanwhile was judged by the old one
        self._running.info = replace(self._running.info, served=weights)

    # ---- adapters

    async def stage_adapter(self, config_json: str, tensors: Mapping[str, Tensor]) -> StagedAdapter:
        """Check an adapter against the model and lay it where the workers find it."""
        return await self._adapters.stage(config_json, tensors)

    async def swap_adapter(self, staged: StagedAdapter | None, weights: ServedWeights) -> None:
        """Serve a staged adapter, or the one held, under a name."""
        await self._adapters.swap(staged, weights)

    async def drop_adapter(self, run_id: str, why: QuartetError) -> None:
        """Serve it no more."""
        await self._adapters.drop(run_id, why)

    # ---- state

    def base_digest(self) -> bytes:
        """Digest of the weights at the start."""
        return self._held.digest

    def info(self) -> EngineInfo:
        """A snapshot."""
        self._running.look()
        running = self._running.started  # counted as it changes: there may be thousands
        asked = not self._running.info.closed and self._running.asking > 0
        waiting = len(self._running.flights) - running
        return replace(self._running.info, running=running, waiting=waiting, asked=asked)

    async def close(self) -> None:
        """Stop; what still runs fails with NOT_READY."""
        self._running.close()
        await self._tasks_end(CLOSE_SECONDS)  # longer where they wait for a core that hangs
        if self._running.llm.output_handler is not None:
            self._running.llm.output_handler.cancel()  # it would report the end of the cores as a fault
        await asyncio.to_thread(self._running.llm.shutdown, timeout=CLOSE_SECONDS)
        self._running.answer_for_cores()
        await self._tasks_end()
        del self._running.llm  # now, and not when the interpreter has lost its modules
        self._staging.close()

    async def _tasks_end(self, timeout_s: float | None = None) -> None:
        if self._running.tasks:
            await asyncio.wait(self._running.tasks, timeout=timeout_s)
