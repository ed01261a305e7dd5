"""The vLLM engine: AsyncLLM in this process, its cores and workers in their own.

1. Everything here happens in one event loop; what is not awaited is atomic.
2. A swap is: pause, load in every worker, label, resume. It is not interrupted: between load and label
   nothing is sampled. A load that fails before it touches the model leaves the old weights serving; one that
   fails later ends the engine, which says so.
3. In `recompute` vLLM drops the keys of running requests and all prefixes; in `keep` running requests keep
   theirs. In both, new requests carry another cache salt, so that no prefix of older weights serves them.
4. Keys that broken weights have left non-finite would spoil whoever gets their place in the cache, masked or
   not: they are wiped, and running requests recomputed, before anything goes on.
5. A request that is pinned to a run or version ends in the pause in which the weights leave it.
6. Each version of an adapter is an adapter of its own inside vLLM. Where one replaces another, the requests
   of its run are submitted again with the tokens that they have; nothing else is paused. Whatever
   kv_on_update says, keys come from one version. The old one is removed when nothing uses it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import structlog
from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from quartet_inference.completion import Completion, Detokenize, StopWatch
from quartet_inference.engine import (
    EngineInfo,
    Event,
    Finish,
    Request,
    Scored,
    ScoreRequest,
    ServedWeights,
    adapter_gone,
    no_base,
    not_ready,
    refusal,
)
from quartet_inference.layout import Layout, check_layout
from quartet_inference.lora import read_adapter
from quartet_inference.sampler import seeds_of
from quartet_inference.vllm.flight import (
    Flight,
    Moved,
    NonFiniteLogits,
    ServedAdapter,
    Submission,
    score_params,
)
from quartet_inference.vllm.staging import StagedAdapter, StagedFile, Staging

log = structlog.get_logger()

#: vLLM's processes get so long to end by themselves; they have nothing to save.
CLOSE_SECONDS = 1.0


@dataclass(frozen=True)
class Held:
    """What is known of the model that vLLM was started with."""

    layout: Layout
    digest: bytes
    end_tokens: frozenset[int]
    detokenize: Detokenize
    served: ServedWeights | None


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
        self._llm = llm
        self._held = held
        self._staging = staging
        self._max_waiting = max_waiting
        self._recompute = recompute_on_update
        self._on_step = on_step
        self._info = EngineInfo(
            "vllm", str(model.dtype).removeprefix("torch."), model.max_model_len,
            llm.vllm_config.scheduler_config.max_num_seqs, model.get_vocab_size(),
            tuple(sorted(held.end_tokens)), held.served, 0, 0, 0, 0, 0.0, False,
        )  # fmt: skip
        self._first_version = held.served.version if held.served else 0
        self._epoch = 0  # of the weights
        self._flights: dict[Flight, None] = {}
        self._scores = 0
        self._unsound = False  # the cache holds non-finite keys
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        self._random = np.random.default_rng()
        lora = llm.vllm_config.lora_config
        self._max_rank = lora.max_lora_rank if lora is not None else 0
        self._max_adapters = max_adapters
        self._adapters: dict[str, ServedAdapter] = {}
        self._lora_ids = count(1)

    # ---- requests

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """Complete a prompt."""
        self._admit(request, request.n)
        events: asyncio.Queue[Event | QuartetError] = asyncio.Queue()
        flights = [self._start(request, index, seed, events) for index, seed in self._seeds(request)]
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
                self._stop(flight)

    def _seeds(self, request: Request) -> list[tuple[int, int]]:
        return list(enumerate(seeds_of(request, self._random)))

    def _admit(self, request: Request | ScoreRequest, count: int) -> None:
        if self._info.closed:
            raise not_ready()
        refused = refusal(request, self._info.serving(request.run_id))
        if refused is not None:
            raise refused
        waiting = sum(not flight.started for flight in self._flights) + self._scores
        if waiting + count > self._max_waiting:
            raise QuartetError("OVERLOADED", f"{waiting} completions wait already", retry_after_ms=500)

    def _start(
        self, request: Request, index: int, seed: int, events: asyncio.Queue[Event | QuartetError]
    ) -> Flight:
        stops = request.sampling.stop
        watch = StopWatch(stops, self._held.detokenize) if stops else None
        completion = Completion(request, index, seed, self._held.end_tokens, watch)
        adapter = self._adapters.get(request.run_id)
        flight = Flight(request, completion, events, self._first_version, adapter)
        if completion.finish is not None:  # it ended where it ran before
            events.put_nowait(completion.finish)
            return flight
        self._flights[flight] = None
        flight.task = self._spawn(self._fly(flight), "vllm-completion")
        return flight

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _stop(self, flight: Flight, error: QuartetError | None = None) -> None:
        self._flights.pop(flight, None)
        if error is not None:
            flight.events.put_nowait(error)
        if flight.task is not None:
            flight.task.cancel()

    async def _fly(self, flight: Flight) -> None:
        try:
            while not await self._attempt(flight):
                log.debug("submitted again under new weights")
        except NonFiniteLogits as error:
            flight.events.put_nowait(error)
            self._unsound = True
            self._spawn(self._heal(), "vllm-heal")
        except QuartetError as error:
            flight.events.put_nowait(error)
        except EngineDeadError:
            self._die("vLLM's core has ended")
        except Exception:
            log.exception("a completion failed in vLLM")
            flight.events.put_nowait(QuartetError("INTERNAL", "vLLM failed this request"))
        finally:
            self._flights.pop(flight, None)

    async def _attempt(self, flight: Flight) -> bool:
        """Submit a completion and follow it; False where new weights came before its first token."""
        flight.again = False
        params = flight.params(self._info.end_token_ids)
        async with (
            self._using(flight.adapter) as lora,
            Submission(self._llm, uuid.uuid4().hex, self._on_step) as submission,
        ):
            flight.submission = submission
            await submission.submit(flight.prompt(), self._salt(), params, lora)
            while True:
                try:
                    output = await submission.next()
                except Moved:
                    return False
                if flight.again:
                    return False
                self._sampled(flight.take(output, submission.starts(output)))
                if flight.completion.finish is not None:
                    return True
                if output.finished:
                    raise QuartetError("INTERNAL", f"vLLM ended it: {output.outputs[0].finish_reason}")

    @asynccontextmanager
    async def _using(self, adapter: ServedAdapter | None) -> AsyncIterator[LoRARequest | None]:
        """Keep an adapter inside vLLM meanwhile."""
        if adapter is None:
            yield None
            return
        adapter.users += 1
        try:
            yield adapter.lora
        finally:
            adapter.users -= 1
            self._remove_unused(adapter)

    def _remove_unused(self, adapter: ServedAdapter) -> None:
        if adapter.retired and not adapter.users and not self._info.closed:
            self._spawn(self._remove(adapter), "vllm-remove-adapter")

    async def _remove(self, adapter: ServedAdapter) -> None:
        try:
            await self._llm.remove_lora(adapter.lora.lora_int_id)
        except EngineDeadError:
            self._die("vLLM's core has ended")

    def _sampled(self, tokens: int) -> None:
        self._info = replace(self._info, tokens_sampled=self._info.tokens_sampled + tokens)

    def _salt(self) -> str:
        return f"weights-{self._epoch}"

    async def score(self, request: ScoreRequest) -> Scored:
        """Score a sequence; a swap starts it anew."""
        self._admit(request, 1)
        served = self._info.serving(request.run_id)
        assert served is not None
        if not request.covered:
            return Scored([], served.version)
        self._scores += 1
        try:
            while True:
                adapter, epoch = self._adapters.get(request.run_id), self._epoch
                version = served.version
                async with self._using(adapter) as lora:
                    logprobs = await self._logprobs(request, lora)
                served = self._info.serving(request.run_id)
                refused = refusal(request, served)
                if epoch == self._epoch and adapter is self._adapters.get(request.run_id):
                    return Scored(logprobs, version)
                if refused is not None:
                    raise refused
                assert served is not None, "it is not refused"
        except NonFiniteLogits:
            self._unsound = True
            self._spawn(self._heal(), "vllm-heal")
            raise
        except EngineDeadError:
            self._die("vLLM's core has ended")
            raise not_ready() from None
        finally:
            self._scores -= 1

    async def _logprobs(self, request: ScoreRequest, lora: LoRARequest | None) -> list[float]:
        tokens = request.tokens
        async with Submission(self._llm, uuid.uuid4().hex, self._on_step) as submission:
            await submission.submit(tokens[:-1], self._salt(), score_params(request), lora)
            output = await submission.next()
        known = [float("nan")]
        known += [output.prompt_logprobs[at][tokens[at]].logprob for at in range(1, len(tokens) - 1)]
        known += output.outputs[0].logprobs.logprobs
        covered = [known[at] for start, length in request.covered for at in range(start, start + length)]
        if not np.isfinite(covered).all():
            raise NonFiniteLogits()
        return covered

    # ---- pause and weights

    async def pause(self) -> int:
        """Decode no further after the current step."""
        async with self._changing:
            self._check_open()
            await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
            self._info = replace(self._info, paused=True)
        return len(self._flights)

    async def resume(self) -> int:
        """Go on."""
        async with self._changing:
            self._check_open()
            await self._llm.engine_core.resume_scheduler_async()
            self._info = replace(self._info, paused=False)
        return len(self._flights)

    async def stage(self, tensors: Mapping[str, Tensor]) -> StagedFile:
        """Check a version against the model and lay it where the workers find it."""
        check_layout(tensors, self._held.layout)
        return await asyncio.to_thread(self._staging.write, tensors)

    async def swap(self, staged: StagedFile | None, weights: ServedWeights) -> None:
        """Serve staged weights, or the ones held, under a name."""
        self._check_open()
        # Shielded: half a swap would stamp tokens with a version that did not sample them.
        await asyncio.shield(self._spawn(self._swap(staged, weights), "vllm-swap"))

    async def _swap(self, staged: StagedFile | None, weights: ServedWeights) -> None:
        async with self._changing:
            self._check_open()
            if staged is None:
                self._end_pinned(weights)
                await self._llm.update_weight_version(str(weights.version))
                self._info = replace(self._info, served=weights)
                return
            core = self._llm.engine_core
            # Of the core, not of AsyncLLM: that one sleeps for 20 ms after every pause.
            await core.pause_scheduler_async(mode="keep", clear_cache=self._recompute)
            began = time.perf_counter()  # before that, the step that was under way went on sampling
            try:
                for run_id in list(self._adapters):  # they were made for the weights that go
                    self._retire(run_id, adapter_gone(run_id))
                self._end_pinned(weights)
                await self._load(staged)
                await self._label(weights)
                self._epoch += 1
                if not self._recompute:
                    for flight in self._flights:
                        flight.again = not flight.started
                self._info = replace(self._info, served=weights)
            finally:
                if not self._info.paused and not self._info.closed:
                    await core.resume_scheduler_async()
            pause_ms = (time.perf_counter() - began) * 1000
            updates = self._info.updates_applied + 1
            self._info = replace(self._info, updates_applied=updates, last_update_pause_ms=pause_ms)

    def _end_pinned(self, weights: ServedWeights, adapter: ServedAdapter | None = None) -> None:
        for flight in [flight for flight in self._flights if flight.adapter is adapter]:
            refused = refusal(flight.request, weights)
            if refused is not None:
                self._stop(flight, refused)

    async def _heal(self) -> None:
        """Wipe what non-finite logits have left behind; one for all that saw them."""
        async with self._changing:
            if self._info.closed or not self._unsound:
                return
            core = self._llm.engine_core
            try:
                await core.pause_scheduler_async(mode="keep", clear_cache=True)
                await self._wipe()
                if not self._info.paused:
                    await core.resume_scheduler_async()
            except Exception as error:  # noqa: BLE001 - nobody awaits this task
                self._die(f"keys could not be wiped: {error!r}")

    async def _label(self, weights: ServedWeights) -> None:
        """Say what the workers have loaded. Errors: INTERNAL; the engine has ended.

        Going on would stamp tokens with a version that did not sample them.
        """
        try:
            await self._wipe()
            await self._llm.update_weight_version(str(weights.version))
        except Exception as error:
            self._die(f"weights were loaded, and nothing after that: {error!r}")
            raise QuartetError("INTERNAL", "the weights could not be labelled") from error

    async def _wipe(self) -> None:
        if not self._unsound:
            return
        failed = [one for core in await self._in_workers("quartet_wipe") for one in core if not one["ok"]]
        if failed:
            raise QuartetError("INTERNAL", f"a worker could not wipe its keys: {failed[0]['why']}")
        self._unsound = False

    async def _in_workers(self, method: str, *arguments: str) -> list[list[dict[str, Any]]]:
        answers: list[list[dict[str, Any]]] = await self._llm.engine_core.call_utility_all_async(
            "collective_rpc", method, None, arguments, None
        )
        return answers

    async def _load(self, staged: StagedFile) -> None:
        """Load in every worker of every core. Errors: INTERNAL; the engine ends where a model was touched."""
        try:
            answers = await self._in_workers("quartet_load", str(staged.path))
        except Exception as error:
            self._die(f"whether weights were changed is unknown: {error!r}")
            raise QuartetError("INTERNAL", "the weights could not be loaded") from error
        failed = [answer for core in answers for answer in core if not answer["ok"]]
        if not failed:
            return
        loaded = len(failed) < sum(len(core) for core in answers)
        if loaded or any(answer["touched"] for answer in failed):
            self._die(f"weights were changed in part: {failed[0]['why']}")
        raise QuartetError("INTERNAL", f"the weights could not be loaded: {failed[0]['why']}")

    # ---- adapters

    async def stage_adapter(self, config_json: str, tensors: Mapping[str, Tensor]) -> StagedAdapter:
        """Check an adapter against the model and lay it where the workers find it."""
        adapter = read_adapter(config_json, tensors, self._held.layout)
        if adapter.rank > self._max_rank:
            raise QuartetError(
                "INVALID_REQUEST",
                f"the adapter has rank {adapter.rank}, this engine was started for at most {self._max_rank}; "
                "raise vllm.max_lora_rank",
                field="adapter",
                value=adapter.rank,
                remedy="raise vllm.max_lora_rank",
            )
        return await asyncio.to_thread(self._staging.write_adapter, config_json, tensors, adapter.rank)

    async def swap_adapter(self, staged: StagedAdapter | None, weights: ServedWeights) -> None:
        """Serve a staged adapter, or the one held, under a name."""
        self._check_open()
        await asyncio.shield(self._spawn(self._swap_adapter(staged, weights), "vllm-adapter"))

    async def _swap_adapter(self, staged: StagedAdapter | None, weights: ServedWeights) -> None:
        async with self._changing:
            self._check_open()
            held = self._adapters.get(weights.run_id)
            if staged is None:
                assert held is not None, "only what is served can be renamed"
                self._end_pinned(weights, held)
                held.weights = weights
                self._tell_adapters()
                return
            served = self._info.served
            if served is None or served.digest != self._held.digest:
                raise no_base(served)
            if held is None and len(self._adapters) >= self._max_adapters:
                raise QuartetError(
                    "OVERLOADED", f"{self._max_adapters} adapters are served already (adapters.max_count)"
                )
            number = next(self._lora_ids)
            # vLLM finds prefixes by the name.
            name = f"{weights.run_id}@{weights.version}-{number}"
            lora = LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(staged.path))
            try:
                await self._llm.add_lora(lora)
            except EngineDeadError:
                self._die("vLLM's core has ended")
                raise not_ready() from None
            began = time.perf_counter()
            adapter = self._adapters[weights.run_id] = ServedAdapter(weights, lora, staged)
            if held is not None:
                self._end_pinned(weights, held)
                self._move(held, adapter)
            self._tell_adapters()
            pause_ms = (time.perf_counter() - began) * 1000
            updates = self._info.updates_applied + 1
            self._info = replace(self._info, updates_applied=updates, last_update_pause_ms=pause_ms)

    def _move(self, held: ServedAdapter, adapter: ServedAdapter) -> None:
        """What one version answered is answered by another from now on."""
        for flight in self._flights:
            if flight.adapter is held:
                flight.adapter, flight.again = adapter, True
                if flight.submission is not None:
                    flight.submission.move()
        held.retired = True
        self._remove_unused(held)

    async def drop_adapter(self, run_id: str, why: QuartetError) -> None:
        """Serve it no more."""
        async with self._changing:
            self._retire(run_id, why)

    def _retire(self, run_id: str, why: QuartetError) -> None:
        adapter = self._adapters.pop(run_id, None)
        if adapter is None:
            return
        for flight in [flight for flight in self._flights if flight.adapter is adapter]:
            self._stop(flight, why)
        adapter.retired = True
        self._remove_unused(adapter)
        self._tell_adapters()

    def _tell_adapters(self) -> None:
        served = tuple(adapter.weights for adapter in self._adapters.values())
        self._info = replace(self._info, adapters=served)

    # ---- state

    def base_digest(self) -> bytes:
        """Digest of the weights at the start."""
        return self._held.digest

    def info(self) -> EngineInfo:
        """A snapshot."""
        running = sum(flight.started for flight in self._flights)
        return replace(self._info, running=running, waiting=len(self._flights) - running)

    def _check_open(self) -> None:
        if self._info.closed:
            raise not_ready()

    def _die(self, why: str) -> None:
        """Never answer again: health sees it, and what still runs fails."""
        if not self._info.closed:
            log.error("engine ended", why=why)
            self._info = replace(self._info, closed=True)
        for flight in list(self._flights):
            self._stop(flight, not_ready())

    async def close(self) -> None:
        """Stop; what still runs fails with NOT_READY."""
        self._info = replace(self._info, closed=True)
        for flight in list(self._flights):
            self._stop(flight, not_ready())
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # it would report the end of the cores as a fault
        await asyncio.to_thread(self._llm.shutdown, timeout=CLOSE_SECONDS)
        del self._llm  # now, and not when the interpreter has lost its modules
        self._staging.close()
