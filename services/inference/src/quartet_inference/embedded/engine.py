"""The embedded engine: one thread that decodes, and the event loop's side of it.

1. Everything about rows, keys and weights happens in the decoding thread; the event loop only posts commands,
   which run between two decode steps, and receives events.
2. At most `max_waiting` completions wait; more are refused with OVERLOADED. A stream's buffer is bounded by
   its own max_tokens.
3. A request whose iterator is closed has left the batch before the next step.
4. Weights change in a command, hence between two steps; requests pinned to something else fail there, before
   another token.
5. While sequences wait to be scored, one bounded piece of that is computed after each decode step.
6. A fault in a step fails the requests in it with INTERNAL; the thread goes on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import structlog
import torch
from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor
from torch import nn

from quartet_inference.completion import FLUSH_TOKENS, Detokenize, StopWatch
from quartet_inference.embedded import forward, model
from quartet_inference.embedded.batch import Batch, Drawn
from quartet_inference.embedded.kv_cache import KvCache
from quartet_inference.embedded.lora import Bank, Matrices, Slot
from quartet_inference.embedded.prefix_cache import PrefixCache
from quartet_inference.embedded.score import ScoreJob, Scorer
from quartet_inference.embedded.sequence import RunningSequence
from quartet_inference.embedded.tickets import Ticket, deliver
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
from quartet_inference.lora import read_adapter
from quartet_inference.sampler import seeds_of

T = TypeVar("T")
log = structlog.get_logger()


@dataclass(frozen=True)
class Limits:
    """Bounds of an engine."""

    max_model_len: int
    max_num_seqs: int = 128
    max_waiting: int = 4096
    kv_cache_bytes: int = 1 << 30
    prefix_cache_bytes: int = 128 << 20
    recompute_on_update: bool = True
    max_adapters: int = 16
    adapter_bytes: int = 1 << 30


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
        """Take over a loaded model. `served` names the weights it has; None.

        Unverified, nothing is generated yet.
        """
        config: Any = network.config
        forward.check_supported(config, limits.max_model_len)
        self._weights = model.ModelWeights(network)
        cache = KvCache(
            model.kv_shape(network), limits.max_num_seqs, limits.max_model_len, limits.kv_cache_bytes
        )
        self._network = network
        self._bank = Bank(limits.max_adapters, limits.adapter_bytes)
        prefixes = PrefixCache(limits.prefix_cache_bytes)
        self._batch = Batch(forward.choose(network, cache, self._bank), cache, prefixes, self._bank)
        self._scorer = Scorer(network, limits.max_waiting, self._bank)
        self._limits = limits
        self._end_tokens = end_tokens
        self._detokenize = detokenize
        self._on_step = on_step
        self._base_digest = self._weights.digest()
        vocabulary = int(config.vocab_size)
        dtype = str(next(network.parameters()).dtype).removeprefix("torch.")
        self._info = EngineInfo(
            "embedded", dtype, limits.max_model_len, limits.max_num_seqs, vocabulary,
            tuple(sorted(end_tokens)), served, 0, 0, 0, 0, 0.0, False,
        )  # fmt: skip
        self._random = np.random.default_rng()
        self._waiting: deque[RunningSequence] = deque()
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Event | QuartetError]]] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._admitted = 0  # completions accepted and not yet in the batch; guarded by _wake
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    # ---- the event loop's side

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        """Complete a prompt."""
        ticket = Ticket(request, asyncio.get_running_loop())
        with self._wake:
            if self._closing:
                raise not_ready()
            if self._admitted + request.n > self._limits.max_waiting:
                raise QuartetError(
                    "OVERLOADED", f"{self._admitted} completions wait already", retry_after_ms=500
                )
            self._admitted += request.n
            self._post(lambda: self._enqueue(ticket))  # within the lock: not after the thread's last look
        unfinished = request.n
        try:
            while unfinished:
                event = await ticket.events.get()
                if isinstance(event, QuartetError):
                    raise event
                unfinished -= isinstance(event, Finish)
                yield event
        finally:
            self._post(lambda: self._drop(ticket))

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
        with self._wake:
            if self._closing:
                raise not_ready()
            self._post(lambda: self._enqueue_score(job))
        try:
            return await answer
        finally:
            self._post(lambda: self._scorer.drop(job))

    async def pause(self) -> int:
        """Decode no further after the current step."""
        return await self._call(lambda: self._set_paused(True))

    async def resume(self) -> int:
        """Go on."""
        return await self._call(lambda: self._set_paused(False))

    async def stage(self, tensors: Mapping[str, Tensor]) -> model.StagedWeights:
        """Check a version against the model."""
        return await asyncio.to_thread(self._weights.stage, tensors)

    async def swap(self, staged: model.StagedWeights | None, weights: ServedWeights) -> None:
        """Serve staged weights, or the ones held, under a name."""
        await self._call(lambda: self._swap(staged, weights))

    async def stage_adapter(self, config_json: str, tensors: Mapping[str, Tensor]) -> Matrices:
        """Check an adapter against the model."""

        def stage() -> Matrices:
            adapter = read_adapter(config_json, tensors, self._weights.layout())
            return Matrices.of(adapter, next(self._network.parameters()).dtype)

        return await asyncio.to_thread(stage)

    async def swap_adapter(self, staged: Matrices | None, weights: ServedWeights) -> None:
        """Serve a staged adapter, or the one held, under a name."""
        await self._call(lambda: self._swap_adapter(staged, weights))

    async def drop_adapter(self, run_id: str, why: QuartetError) -> None:
        """Serve it no more."""
        await self._call(lambda: self._drop_adapter(run_id, why))

    def base_digest(self) -> bytes:
        """Digest of the weights at the start."""
        return self._base_digest

    def info(self) -> EngineInfo:
        """A snapshot."""
        return self._info

    async def close(self) -> None:
        """Stop the thread; what still runs fails with NOT_READY."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    async def _call(self, command: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            try:
                result = command()
                self._note()  # whoever awaits the answer sees the state after it
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, result, None)

        with self._wake:
            if self._closing:
                raise not_ready()
            self._commands.append(run)
            self._wake.notify()
        return await answer

    # ---- the decoding thread's side

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._await_work():
                    self._cycle()
        except Exception:
            log.exception("the decoding thread died")
        with self._wake:
            self._closing = True  # from here on nothing is posted any more that awaits an answer
            commands, self._commands = self._commands, deque()
        self._info = replace(self._info, closed=True)
        for command in commands:
            command()
        for ticket in {row.ticket: None for row in [*self._batch.rows, *self._waiting]}:
            self._fail(ticket, not_ready())
        self._scorer.fail(not_ready())
        self._deliver()

    def _await_work(self) -> bool:
        """Run the commands; wait until there is something to decode. False: the engine closes."""
        while True:
            with self._wake:
                idle = not self._has_work()
                while idle and not self._commands and not self._closing:
                    self._wake.wait()
                commands, self._commands = self._commands, deque()
            for command in commands:
                command()
            if commands:
                self._note()
                self._deliver()
            if self._closing:
                return False
            if self._has_work():
                return True

    def _has_work(self) -> bool:
        return not self._info.paused and bool(self._batch.rows or self._waiting or self._scorer)

    def _cycle(self) -> None:
        """Let requests join, then take one step."""
        joiners: list[RunningSequence] = []
        try:
            joiners = [self._waiting.popleft() for _ in range(self._batch.room_for(self._waiting))]
            if joiners:
                with self._wake:
                    self._admitted -= len(joiners)
                self._accept(self._batch.join(joiners))
            if self._batch.rows:
                self._hand_back(self._batch.make_room())
                self._accept(self._batch.step())
        except Exception:
            log.exception("decode step failed")
            failed = {row.ticket: None for row in [*self._batch.rows, *joiners]}
            for ticket in failed:
                self._fail(ticket, QuartetError("INTERNAL", "the decode step failed"))
        if self._scorer:
            assert self._info.served is not None
            self._scorer.piece(self._info.served)
        self._note()
        self._deliver()
        self._on_step()

    def _accept(self, drawn: list[Drawn]) -> None:
        served = self._info.served
        assert served is not None
        ended = []
        for item in drawn:
            if not item.sound:
                continue
            row = item.row
            version = (served if row.slot is None else row.slot.weights).version
            finish = row.accept(item.token, item.logprob, version)
            if finish is not None:
                self._send(row.ticket, row.tell())
                self._send(row.ticket, finish)
                ended.append(row)
            elif row.untold >= FLUSH_TOKENS:
                self._send(row.ticket, row.tell())
        self._fail_broken([item.row for item in drawn if not item.sound])
        for row in ended:
            if row not in self._batch.rows:  # a broken completion of the same request took it along
                continue
            self._batch.remove(row, keep_prefix=row.request.keep_prefix)
        self._note(tokens_sampled=self._info.tokens_sampled + len(drawn))

    def _fail_broken(self, rows: list[RunningSequence]) -> None:
        """End requests that the weights have no distribution for."""
        self._batch.clean(rows)
        for ticket in {row.ticket: None for row in rows}:
            self._fail(ticket, QuartetError("INTERNAL", "the weights give non-finite logits"))

    def _enqueue(self, ticket: Ticket) -> None:
        request = ticket.request
        refused = refusal(request, self._info.serving(request.run_id))
        if refused is not None:
            with self._wake:
                self._admitted -= request.n
            self._send(ticket, refused)
            return
        for index, seed in enumerate(seeds_of(request, self._random)):
            stops = request.sampling.stop
            watch = StopWatch(stops, self._detokenize) if stops else None
            slot = self._bank.slots.get(request.run_id)
            sequence = RunningSequence(request, index, seed, self._end_tokens, watch, ticket, slot)
            if sequence.finish is not None:  # it ended where it ran before
                with self._wake:
                    self._admitted -= 1
                self._send(ticket, sequence.finish)
            else:
                ticket.sequences.append(sequence)
        self._waiting.extend(ticket.sequences)

    def _enqueue_score(self, job: ScoreJob) -> None:
        run_id = job.request.run_id
        job.slot = self._bank.slots.get(run_id)
        self._scorer.add(job, self._info.serving(run_id))

    def _tickets_of(self, slot: Slot | None) -> list[Ticket]:
        rows = [*self._batch.rows, *self._waiting]
        return list({row.ticket: None for row in rows if row.slot is slot})

    def _fail_pinned(self, slot: Slot | None, weights: ServedWeights) -> None:
        """What an adapter, or the base model, has to answer is answered by these weights from now on."""
        for ticket in self._tickets_of(slot):
            refused = refusal(ticket.request, weights)
            if refused is not None:
                self._fail(ticket, refused)
        self._scorer.weights_change(weights, slot)

    def _swap(self, staged: model.StagedWeights | None, weights: ServedWeights) -> None:
        began = time.perf_counter()
        self._fail_pinned(None, weights)
        if staged is None:
            self._info = replace(self._info, served=weights)
            return
        for run_id in list(self._bank.slots):  # they were made for the weights that go
            self._drop_adapter(run_id, adapter_gone(run_id))
        leaving = self._batch.weights_changed(
            lambda: self._weights.apply(staged), self._limits.recompute_on_update
        )
        self._hand_back(reversed(leaving))
        self._updated(began, served=weights)

    def _swap_adapter(self, staged: Matrices | None, weights: ServedWeights) -> None:
        began = time.perf_counter()
        slot = self._bank.slots.get(weights.run_id)
        if staged is None:
            assert slot is not None, "only what is served can be renamed"
            self._fail_pinned(slot, weights)
            slot.weights = weights
            self._updated(None)
            return
        served = self._info.served
        if served is None or served.digest != self._base_digest:
            raise no_base(served)
        before = 0 if slot is None else slot.serial
        self._bank.hook(self._network, staged)
        self._bank.put(staged, weights)
        if slot is not None:
            self._fail_pinned(slot, weights)
            leaving = self._batch.adapter_changed(slot, before, self._limits.recompute_on_update)
            self._hand_back(reversed(leaving))
        self._updated(began)

    def _drop_adapter(self, run_id: str, why: QuartetError) -> None:
        slot = self._bank.slots.pop(run_id, None)
        if slot is None:
            return
        for ticket in self._tickets_of(slot):
            self._fail(ticket, why)
        self._scorer.slot_gone(slot, why)
        self._batch.adapter_gone(slot.serial)
        self._updated(None)

    def _updated(self, began: float | None, **changes: ServedWeights) -> None:
        """Other weights are served; those of an update that began then."""
        adapters = tuple(slot.weights for slot in self._bank.slots.values())
        self._info = replace(self._info, adapters=adapters, **changes)  # type: ignore[arg-type]
        if began is None:
            return
        pause_ms = (time.perf_counter() - began) * 1000
        updates = self._info.updates_applied + 1
        self._info = replace(self._info, updates_applied=updates, last_update_pause_ms=pause_ms)

    def _hand_back(self, rows: Iterable[RunningSequence]) -> None:
        """Let rows that have left the batch wait before all others, the last one foremost."""
        for row in rows:
            self._waiting.appendleft(row)
            with self._wake:
                self._admitted += 1

    def _set_paused(self, paused: bool) -> int:
        self._info = replace(self._info, paused=paused)
        return len(self._batch.rows) + len(self._waiting) + len(self._scorer)

    def _drop(self, ticket: Ticket) -> None:
        """Take what is left of a request out of the batch and the queue."""
        for sequence in ticket.sequences:
            if sequence in self._batch.rows:
                self._batch.remove(sequence)
            elif sequence in self._waiting:
                self._waiting.remove(sequence)
                with self._wake:
                    self._admitted -= 1
        ticket.sequences.clear()

    def _fail(self, ticket: Ticket, error: QuartetError) -> None:
        self._drop(ticket)
        self._send(ticket, error)

    def _send(self, ticket: Ticket, event: Event | QuartetError) -> None:
        self._outbox.setdefault(ticket.loop, []).append((ticket, event))

    def _deliver(self) -> None:
        """Hand the events of a step to their loops, one wake-up for each loop."""
        for loop, events in self._outbox.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, events)
        self._outbox = {}

    def _note(self, **changes: int) -> None:
        running, waiting = len(self._batch.rows), len(self._waiting)
        self._info = replace(self._info, running=running, waiting=waiting, **changes)  # type: ignore[arg-type]
