"""The commands that change which weights answer: those of the base model, and of adapters.

1. They run between two decode steps. A request pinned to something else fails there, before another token.
2. Served weights get another name only if it is the name of the same weights.
3. Adapters go with the base model that they were made for; none is put upon another one.
"""

from __future__ import annotations

import time

from quartet.errors import QuartetError
from torch import nn

from quartet_inference.embedded.batch import Batch
from quartet_inference.embedded.lora import Bank, Matrices, Slot
from quartet_inference.embedded.model import ModelWeights, StagedWeights
from quartet_inference.embedded.packs import Packs
from quartet_inference.embedded.requests import Requests
from quartet_inference.embedded.score import Scorer
from quartet_inference.embedded.snapshot import Snapshot
from quartet_inference.engine import ServedWeights, adapter_gone, no_base, refusal
from quartet_inference.held import check_name


class Swaps:
    """The weights of one decoder. For its thread, but for `weights.stage` and `weights.layout`."""

    def __init__(
        self,
        network: nn.Module,
        batch: Batch,
        scorer: Scorer,
        bank: Bank,
        requests: Requests,
        snapshot: Snapshot,
        packs: Packs,
        *,
        recomputes: bool,
    ) -> None:
        """`recomputes`: rows that go on by other weights compute their keys anew."""
        self._network, self._batch, self._scorer, self._bank = network, batch, scorer, bank
        self._requests, self._snapshot, self._recomputes = requests, snapshot, recomputes
        self._packs = packs
        self.weights = ModelWeights(network)
        self.base_digest = self.weights.digest()

    def swap(self, staged: StagedWeights | None, weights: ServedWeights) -> None:
        """Serve staged weights, or the ones held, under a name. Errors: NOT_READY."""
        began = time.perf_counter()
        if staged is None:
            check_name(weights, self._snapshot.info.served, self.base_digest)
        self._fail_pinned(None, weights)
        if staged is None:
            self._snapshot.change(served=weights)
            return
        for run_id in list(self._bank.slots):  # they were made for the weights that go
            self.drop_adapter(run_id, adapter_gone(run_id))
        self._packs.forget()  # before, and so also where a copy fails half way
        leaving = self._batch.weights_changed(lambda: self.weights.apply(staged), self._recomputes)
        self._requests.hand_back(reversed(leaving))
        self._snapshot.change(served=weights)
        self._note_update(began)

    def swap_adapter(self, staged: Matrices | None, weights: ServedWeights) -> None:
        """Serve a staged adapter, or the one held, under a name. Errors: INVALID_REQUEST, OVERLOADED."""
        began = time.perf_counter()
        slot = self._bank.slots.get(weights.run_id)
        if staged is None:
            assert slot is not None, "only what is served can be renamed"
            self._fail_pinned(slot, weights)
            slot.weights = weights
            self._note_adapters()
            return
        served = self._snapshot.info.served
        if served is None or served.digest != self.base_digest:
            raise no_base(served)
        before = 0 if slot is None else slot.serial
        self._bank.hook(self._network, staged)
        self._bank.put(staged, weights)
        if slot is not None:
            self._fail_pinned(slot, weights)
            leaving = self._batch.adapter_changed(slot, before, self._recomputes)
            self._requests.hand_back(reversed(leaving))
        self._note_adapters()
        self._note_update(began)

    def drop_adapter(self, run_id: str, why: QuartetError) -> None:
        """Serve an adapter no more."""
        slot = self._bank.slots.pop(run_id, None)
        if slot is None:
            return
        for ticket in self._requests.of(slot):
            self._requests.fail(ticket, why)
        self._scorer.slot_gone(slot, why)
        self._batch.adapter_gone(slot.serial)
        self._note_adapters()

    def _fail_pinned(self, slot: Slot | None, weights: ServedWeights) -> None:
        """What an adapter, or the base model, has to answer is answered by these weights from now on."""
        for ticket in self._requests.of(slot):
            error = refusal(ticket.request, weights)
            if error is not None:
                self._requests.fail(ticket, error)
        self._scorer.weights_change(weights, slot)

    def _note_adapters(self) -> None:
        self._snapshot.change(adapters=tuple(slot.weights for slot in self._bank.slots.values()))

    def _note_update(self, began: float) -> None:
        """One that began then is through."""
        self._snapshot.change(
            updates_applied=self._snapshot.info.updates_applied + 1,
            last_update_pause_ms=(time.perf_counter() - began) * 1000,
        )
