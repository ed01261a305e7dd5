"""What the decoding thread does: its commands, and the steps between which they run.

1. Everything here but `info`, `swaps.weights.stage` and `swaps.weights.layout` belongs to the thread that is
   in `run`; others reach it by commands, which run between two decode steps.
2. A request that was dropped has left the batch before the next step.
3. Weights change in a command (swaps.py), hence between two steps.
4. While sequences wait to be scored, one bounded piece of that is computed after each decode step.
5. A fault in a step fails the requests in it with INTERNAL, or with OVERLOADED where the device had no room,
   or else the first that waits; one that cannot begin fails alone. The thread goes on, unless the device is
   lost: then everybody gets NOT_READY, and the engine has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import structlog
import torch
from quartet.errors import QuartetError
from torch import nn

from quartet_inference.embedded import forward, graphs, hub, probe, products
from quartet_inference.embedded.batch import Batch, Drawn
from quartet_inference.embedded.commands import Commands
from quartet_inference.embedded.device import is_lost, within_memory
from quartet_inference.embedded.experts import NotingForward
from quartet_inference.embedded.kv_cache import KvCache
from quartet_inference.embedded.limits import Limits
from quartet_inference.embedded.lora import Bank
from quartet_inference.embedded.packs import Packs
from quartet_inference.embedded.prefix_cache import PrefixCache
from quartet_inference.embedded.requests import Requests, tickets_of
from quartet_inference.embedded.score import ScoreJob, Scorer
from quartet_inference.embedded.sequence import RunningSequence
from quartet_inference.embedded.snapshot import Snapshot
from quartet_inference.embedded.swaps import Swaps
from quartet_inference.embedded.tickets import Ticket
from quartet_inference.engine import EngineInfo, NonFiniteLogits, ServedWeights, not_ready, refusal
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
        products.widen_logits(network)
        self._commands = commands
        self._end_tokens = end_tokens
        self._detokenize = detokenize
        self._on_step = on_step
        cache = KvCache(
            hub.kv_shape(network), limits.max_num_seqs, limits.max_model_len, limits.kv_cache_bytes
        )
        packs = Packs(limits.packed_bytes)
        self._bank = Bank(limits.max_adapters, limits.adapter_bytes)
        prefixes = PrefixCache(limits.prefix_cache_bytes)
        run = graphs.choose(network, cache, self._bank, packs, limits.cuda_graphs)
        probe.check(network, run, cache)
        noting = NotingForward(run, network) if limits.routed_experts else None
        self._batch = Batch(noting or run, cache, prefixes, self._bank)
        self._scorer = Scorer(network, limits.max_waiting, self._bank)
        self.requests = Requests(self._batch, commands)
        self._random = np.random.default_rng()
        routers = noting.layers if noting else 0
        self._snapshot = Snapshot(network, limits, end_tokens, served, routers)
        self.swaps = Swaps(
            network,
            self._batch,
            self._scorer,
            self._bank,
            self.requests,
            self._snapshot,
            packs,
            recomputes=limits.recompute_on_update,
        )

    @property
    def info(self) -> EngineInfo:
        """What the engine says of itself. From any thread."""
        return self._snapshot.info

    def run(self) -> None:
        """The thread's work, until the commands are closed."""
        try:
            with torch.inference_mode():
                while self._await_work():
                    self._cycle()
        except Exception as error:
            log.exception("the decoding thread died")
            self._snapshot.change(ended=f"the decoding thread died: {error!r}")
        commands = self._commands.close()  # from here on nothing is taken any more that awaits an answer
        self._snapshot.change(closed=True)
        for command in commands:
            try:
                command()
            except Exception:
                log.exception("a command failed behind the end")
        for ticket in self.requests.all():
            self.requests.send(ticket, not_ready())
        self._scorer.fail(not_ready())
        self.requests.deliver()

    def _await_work(self) -> bool:
        """Run the commands; wait until there is something to decode. False: the engine closes."""
        while True:
            if self._commands.run(idle=not self._has_work()):
                self.note()
                self.requests.deliver()
            if self._commands.closing:
                return False
            if self._has_work():
                return True

    def _has_work(self) -> bool:
        return not self.info.paused and bool(self._batch.rows or self.requests.waiting or self._scorer)

    def _cycle(self) -> None:
        """Let requests join, then take one step."""
        joiners: list[RunningSequence] = []
        try:
            joiners = self.requests.join(self._batch.room_for(self.requests.waiting))
            if joiners:
                self._accept(within_memory(lambda: self._batch.join(joiners)))
            if self._batch.rows:
                self.requests.hand_back(self._batch.make_room())
                self._accept(within_memory(self._batch.step))
        except Exception as error:
            log.exception("decode step failed")
            if not isinstance(error, QuartetError) and is_lost(self._batch.device):
                # What is in the batch, or waits, hears of it at the end.
                for ticket in set(tickets_of(joiners)).difference(self.requests.all()):
                    self.requests.send(ticket, not_ready())
                raise
            internal = QuartetError("INTERNAL", "the decode step failed")
            why = error if isinstance(error, QuartetError) else internal
            # Where nothing had joined, the first that waits must go, or the next cycle fails as this one did.
            rows = [*self._batch.rows, *joiners] or list(islice(self.requests.waiting, 1))
            for ticket in tickets_of(rows):
                self.requests.fail(ticket, why)
        if self._scorer:
            assert self.info.served is not None
            self._scorer.piece(self.info.served)
        self.note()
        self.requests.deliver()
        self._on_step()

    def _accept(self, drawn: list[Drawn]) -> None:
        served = self.info.served
        assert served is not None
        ended = []
        for item in drawn:
            if not item.sound:
                continue
            row = item.row
            stamp = (served if row.slot is None else row.slot.weights).stamp
            finish = row.accept(item.token, item.logprob, stamp, item.top)
            if finish is not None:
                self.requests.send(row.ticket, row.tell())
                if (routed := row.routed()) is not None:
                    self.requests.send(row.ticket, routed)
                self.requests.send(row.ticket, finish)
                ended.append(row)
            elif row.has_piece:
                self.requests.send(row.ticket, row.tell())
        self._fail_broken([item.row for item in drawn if not (item.sound or item.stuck)])
        for ticket in tickets_of(item.row for item in drawn if item.stuck):
            self.requests.fail(ticket, stuck())
        for row in ended:
            if row.row is None:  # a broken completion of the same request took it along
                continue
            self._batch.remove(row, keep_prefix=row.request.keep_prefix)
        self.note(tokens_sampled=self.info.tokens_sampled + len(drawn))

    def _fail_broken(self, rows: list[RunningSequence]) -> None:
        """End requests that the weights have no distribution for."""
        self._batch.clean(rows)
        for ticket in tickets_of(rows):
            self.requests.fail(ticket, NonFiniteLogits())

    def enqueue(self, ticket: Ticket) -> None:
        """Let a request wait for its place, or refuse it."""
        request = ticket.request
        error = refusal(request, self.info.serving(request.run_id))
        begun: list[RunningSequence] = []
        try:
            if error is None:
                slot, seeds = self._bank.slots.get(request.run_id), seeds_of(request, self._random)
                begun = ticket.begin(seeds, slot, self._end_tokens, self._detokenize, self._batch.device)
        except Exception:
            log.exception("a request cannot begin")
            error = QuartetError("INTERNAL", "the request cannot begin")
        if error is not None:
            self._commands.admitted(-request.n)
            self.requests.send(ticket, error)
            return
        for sequence in begun:
            if sequence.finish is not None:  # it ended where it ran before
                self._commands.admitted(-1)
                self.requests.send(ticket, sequence.finish)
            else:
                ticket.sequences.append(sequence)
        self.requests.wait(ticket.sequences)

    def enqueue_score(self, job: ScoreJob) -> None:
        """Let a sequence wait for its score, or refuse it."""
        run_id = job.request.run_id
        job.slot = self._bank.slots.get(run_id)
        self._scorer.add(job, self.info.serving(run_id))

    def drop_score(self, job: ScoreJob) -> None:
        """Nobody waits for this one any more."""
        self._scorer.drop(job)

    def set_paused(self, paused: bool) -> int:
        """Decode no further, or go on; how many wait for that."""
        self._snapshot.change(paused=paused)
        return len(self._batch.rows) + len(self.requests.waiting) + len(self._scorer)

    def note(self, *, asked: bool = False, **changes: int) -> None:
        """Bring the snapshot up to date; `asked`: a command that somebody waits for begins."""
        running, waiting = len(self._batch.rows), len(self.requests.waiting)
        asked = asked or (bool(self._scorer) and not self.info.paused)
        self._snapshot.change(running=running, waiting=waiting, asked=asked, **changes)
