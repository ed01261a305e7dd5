"""What the decoding thread does: rows, keys, weights, and the steps between which they change.

1. Everything here but `info`, `weights.stage` and `weights.layout` belongs to the thread that is in `run`;
   others reach it by commands, which run between two decode steps.
2. A request that was dropped has left the batch before the next step.
3. Weights change in a command, hence between two steps; requests pinned to something else fail there, before
   another token.
4. While sequences wait to be scored, one bounded piece of that is computed after each decode step.
5. A fault in a step fails the requests in it with INTERNAL, or with OVERLOADED where the device had no room,
   or else the first that waits; one that cannot begin fails alone. The thread goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import structlog
import torch
from quartet.errors import QuartetError
from torch import nn

from quartet_inference.completion import FLUSH_TOKENS
from quartet_inference.embedded import forward, graphs, hub, model, probe, products
from quartet_inference.embedded.batch import Batch, Drawn
from quartet_inference.embedded.commands import Commands
from quartet_inference.embedded.device import within_memory
from quartet_inference.embedded.experts import NotingForward
from quartet_inference.embedded.kv_cache import KvCache
from quartet_inference.embedded.limits import Limits
from quartet_inference.embedded.lora import Bank, Matrices, Slot
from quartet_inference.embedded.prefix_cache import PrefixCache
from quartet_inference.embedded.score import ScoreJob, Scorer
from quartet_inference.embedded.sequence import RunningSequence
from quartet_inference.embedded.tickets import Ticket, deliver
from quartet_inference.engine import (
    EngineInfo,
    Event,
    ServedWeights,
    adapter_gone,
    no_base,
    not_ready,
    refusal,
)
from quartet_inference.held import check_name
from quartet_inference.sampler import seeds_of
from quartet_inference.structure.following import stuck
from quartet_inference.text_stream import Detokenize

log = structlog.get_logger()


class Decoder:
    """Continuous batching over a transformers model."""

    def __init__(
        self,
        network: nn.Module,
        limits: Limits,
        end_tokens: frozenset[int],
        detokenize: Detokenize,
        served: ServedWeights | None,
        on_step: Callable[[], None],
        commands: Commands,
    ) -> None:
        """As EmbeddedEngine; `commands` come from the event loops."""
        config: Any = network.config
        forward.check_supported(config, limits.max_model_len)
        products.use(network)
        products.widen_logits(network)
        self._commands = commands
        self._network = network
        self._limits = limits
        self._end_tokens = end_tokens
        self._detokenize = detokenize
        self._on_step = on_step
        self.weights = model.ModelWeights(network)
        self.base_digest = self.weights.digest()
        cache = KvCache(
            hub.kv_shape(network), limits.max_num_seqs, limits.max_model_len, limits.kv_cache_bytes
        )
        self._bank = Bank(limits.max_adapters, limits.adapter_bytes)
        prefixes = PrefixCache(limits.prefix_cache_bytes)
        run = graphs.choose(network, cache, self._bank, limits.cuda_graphs)
        probe.check(network, run, cache)
        noting = NotingForward(run, network) if limits.routed_experts else None
        self._batch = Batch(noting or run, cache, prefixes, self._bank)
        self._scorer = Scorer(network, limits.max_waiting, self._bank)
        # In the order in which they join; keys alone, because any of them may leave.
        self._waiting: OrderedDict[RunningSequence, None] = OrderedDict()
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Event | QuartetError]]] = {}
        self._random = np.random.default_rng()
        vocabulary = int(config.get_text_config().vocab_size)
        dtype = str(next(network.parameters()).dtype).removeprefix("torch.")
        #: A snapshot, replaced as a whole: the event loop reads it.
        self.info = EngineInfo(
            "embedded", dtype, limits.max_model_len, limits.max_num_seqs, vocabulary,
            tuple(sorted(end_tokens)), served, 0, 0, 0, 0, 0.0, False,
            routers=noting.layers if noting else 0,
        )  # fmt: skip

    def run(self) -> None:
        """The thread's work, until the commands are closed."""
        try:
            with torch.inference_mode():
                while self._await_work():
                    self._cycle()
        except Exception as error:
            log.exception("the decoding thread died")
            self.info = replace(self.info, ended=f"the decoding thread died: {error!r}")
        commands = self._commands.close()  # from here on nothing is taken any more that awaits an answer
        self.info = replace(self.info, closed=True)
        for command in commands:
            try:
                command()
            except Exception:
                log.exception("a command failed behind the end")
        for ticket in {row.ticket: None for row in [*self._batch.rows, *self._waiting]}:
            self._send(ticket, not_ready())
        self._scorer.fail(not_ready())
        self._deliver()

    def _await_work(self) -> bool:
        """Run the commands; wait until there is something to decode. False: the engine closes."""
        while True:
            if self._commands.run(idle=not self._has_work()):
                self.note()
                self._deliver()
            if self._commands.closing:
                return False
            if self._has_work():
                return True

    def _has_work(self) -> bool:
        return not self.info.paused and bool(self._batch.rows or self._waiting or self._scorer)

    def _cycle(self) -> None:
        """Let requests join, then take one step."""
        joiners: list[RunningSequence] = []
        try:
            room = self._batch.room_for(self._waiting)
            joiners = [self._waiting.popitem(last=False)[0] for _ in range(room)]
            if joiners:
                self._commands.admitted(-len(joiners))
                self._accept(within_memory(lambda: self._batch.join(joiners)))
            if self._batch.rows:
                self._hand_back(self._batch.make_room())
                self._accept(within_memory(self._batch.step))
        except Exception as error:
            log.exception("decode step failed")
            internal = QuartetError("INTERNAL", "the decode step failed")
            why = error if isinstance(error, QuartetError) else internal
            # Where nothing had joined, the first that waits must go, or the next cycle fails as this one did.
            rows = [*self._batch.rows, *joiners] or list(islice(self._waiting, 1))
            failed = {row.ticket: None for row in rows}
            for ticket in failed:
                self._fail(ticket, why)
        if self._scorer:
            assert self.info.served is not None
            self._scorer.piece(self.info.served)
        self.note()
        self._deliver()
        self._on_step()

    def _accept(self, drawn: list[Drawn]) -> None:
        served = self.info.served
        assert served is not None
        ended = []
        for item in drawn:
            if not item.sound:
                continue
            row = item.row
            version = (served if row.slot is None else row.slot.weights).version
            finish = row.accept(item.token, item.logprob, version, item.top)
            if finish is not None:
                self._send(row.ticket, row.tell())
                if (routed := row.routed()) is not None:
                    self._send(row.ticket, routed)
                self._send(row.ticket, finish)
                ended.append(row)
            elif row.untold >= FLUSH_TOKENS:
                self._send(row.ticket, row.tell())
        self._fail_broken([item.row for item in drawn if not (item.sound or item.stuck)])
        for ticket in {item.row.ticket: None for item in drawn if item.stuck}:
            self._fail(ticket, stuck())
        for row in ended:
            if row.row is None:  # a broken completion of the same request took it along
                continue
            self._batch.remove(row, keep_prefix=row.request.keep_prefix)
        self.note(tokens_sampled=self.info.tokens_sampled + len(drawn))

    def _fail_broken(self, rows: list[RunningSequence]) -> None:
        """End requests that the weights have no distribution for."""
        self._batch.clean(rows)
        for ticket in {row.ticket: None for row in rows}:
            self._fail(ticket, QuartetError("INTERNAL", "the weights give non-finite logits"))

    def enqueue(self, ticket: Ticket) -> None:
        """Let a request wait for its place, or refuse it."""
        request = ticket.request
        refused = refusal(request, self.info.serving(request.run_id))
        begun: list[RunningSequence] = []
        try:
            if refused is None:
                slot, seeds = self._bank.slots.get(request.run_id), seeds_of(request, self._random)
                begun = ticket.begin(seeds, slot, self._end_tokens, self._detokenize, self._batch.device)
        except Exception:
            log.exception("a request cannot begin")
            refused = QuartetError("INTERNAL", "the request cannot begin")
        if refused is not None:
            self._commands.admitted(-request.n)
            self._send(ticket, refused)
            return
        for sequence in begun:
            if sequence.finish is not None:  # it ended where it ran before
                self._commands.admitted(-1)
                self._send(ticket, sequence.finish)
            else:
                ticket.sequences.append(sequence)
        self._waiting.update(dict.fromkeys(ticket.sequences))

    def enqueue_score(self, job: ScoreJob) -> None:
        """Let a sequence wait for its score, or refuse it."""
        run_id = job.request.run_id
        job.slot = self._bank.slots.get(run_id)
        self._scorer.add(job, self.info.serving(run_id))

    def drop_score(self, job: ScoreJob) -> None:
        """Nobody waits for this one any more."""
        self._scorer.drop(job)

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

    def swap(self, staged: model.StagedWeights | None, weights: ServedWeights) -> None:
        """Serve staged weights, or the ones held, under a name."""
        began = time.perf_counter()
        if staged is None:
            check_name(weights, self.info.served, self.base_digest)
        self._fail_pinned(None, weights)
        if staged is None:
            self.info = replace(self.info, served=weights)
            return
        for run_id in list(self._bank.slots):  # they were made for the weights that go
            self.drop_adapter(run_id, adapter_gone(run_id))
        leaving = self._batch.weights_changed(
            lambda: self.weights.apply(staged), self._limits.recompute_on_update
        )
        self._hand_back(reversed(leaving))
        self._updated(began, served=weights)

    def swap_adapter(self, staged: Matrices | None, weights: ServedWeights) -> None:
        """Serve a staged adapter, or the one held, under a name."""
        began = time.perf_counter()
        slot = self._bank.slots.get(weights.run_id)
        if staged is None:
            assert slot is not None, "only what is served can be renamed"
            self._fail_pinned(slot, weights)
            slot.weights = weights
            self._updated(None)
            return
        served = self.info.served
        if served is None or served.digest != self.base_digest:
            raise no_base(served)
        before = 0 if slot is None else slot.serial
        self._bank.hook(self._network, staged)
        self._bank.put(staged, weights)
        if slot is not None:
            self._fail_pinned(slot, weights)
            leaving = self._batch.adapter_changed(slot, before, self._limits.recompute_on_update)
            self._hand_back(reversed(leaving))
        self._updated(began)

    def drop_adapter(self, run_id: str, why: QuartetError) -> None:
        """Serve an adapter no more."""
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
        self.info = replace(self.info, adapters=adapters, **changes)  # type: ignore[arg-type]
        if began is None:
            return
        pause_ms = (time.perf_counter() - began) * 1000
        updates = self.info.updates_applied + 1
        self.info = replace(self.info, updates_applied=updates, last_update_pause_ms=pause_ms)

    def _hand_back(self, rows: Iterable[RunningSequence]) -> None:
        """Let rows that have left the batch wait before all others, the last one foremost."""
        for row in rows:
            self._waiting[row] = None
            self._waiting.move_to_end(row, last=False)
            self._commands.admitted(1)

    def set_paused(self, paused: bool) -> int:
        """Decode no further, or go on; how many wait for that."""
        self.info = replace(self.info, paused=paused)
        return len(self._batch.rows) + len(self._waiting) + len(self._scorer)

    def drop(self, ticket: Ticket) -> None:
        """Take what is left of a request out of the batch and the queue."""
        for sequence in ticket.sequences:
            if sequence.row is not None:
                self._batch.remove(sequence)
            elif sequence in self._waiting:
                del self._waiting[sequence]
                self._commands.admitted(-1)
        ticket.sequences.clear()

    def _fail(self, ticket: Ticket, error: QuartetError) -> None:
        self.drop(ticket)
        self._send(ticket, error)

    def _send(self, ticket: Ticket, event: Event | QuartetError) -> None:
        self._outbox.setdefault(ticket.loop, []).append((ticket, event))

    def _deliver(self) -> None:
        """Hand the events of a step to their loops, one wake-up for each loop."""
        for loop, events in self._outbox.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, events)
        self._outbox = {}

    def note(self, **changes: int) -> None:
        """Bring the snapshot up to date."""
        running, waiting = len(self._batch.rows), len(self._waiting)
        self.info = replace(self.info, running=running, waiting=waiting, **changes)  # type: ignore[arg-type]
