"""The ledger: where every rollout that was ever dispatched for training is now.

1. dispatched = trained + sum(discarded) + in_flight, after every change (asserted).
2. No count ever shrinks except in_flight; in_flight is never negative.
3. A rollout is counted once, however often its member had to be sent again.

Pure: a value that its owner changes; nothing here does I/O.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from quartet.v1 import orchestrator_service_pb2 as pb


@dataclass
class Ledger:
    """Counts of rollouts; those that were discarded by reason."""

    dispatched: int = 0
    trained: int = 0
    in_flight: int = 0
    discarded: Counter[str] = field(default_factory=Counter)

    def dispatch(self, rollouts: int) -> None:
        """So many more are in flight."""
        assert rollouts > 0
        self.dispatched += rollouts
        self.in_flight += rollouts
        self._check()

    def train(self, rollouts: int) -> None:
        """So many of those in flight were trained on."""
        assert rollouts > 0
        self.trained += rollouts
        self.in_flight -= rollouts
        self._check()

    def discard(self, rollouts: int, reason: str) -> None:
        """So many of those in flight were given up."""
        assert rollouts > 0 and reason
        self.discarded[reason] += rollouts
        self.in_flight -= rollouts
        self._check()

    def after_training(self, rollouts: int) -> Ledger:
        """What it will be once these rollouts are trained."""
        after = self._copy()
        after.train(rollouts)
        return after

    def after_discarding(self, rollouts: int, reason: str) -> Ledger:
        """What it will be once these rollouts are given up."""
        after = self._copy()
        after.discard(rollouts, reason)
        return after

    def to_proto(self) -> pb.Ledger:
        """A copy, as the contract has it."""
        return pb.Ledger(
            dispatched=self.dispatched,
            trained=self.trained,
            discarded=dict(self.discarded),
            in_flight=self.in_flight,
        )

    def _copy(self) -> Ledger:
        return Ledger(self.dispatched, self.trained, self.in_flight, Counter(self.discarded))

    def _check(self) -> None:
        assert self.in_flight >= 0, f"more rollouts ended than were dispatched: {self}"
        assert self.dispatched == self.trained + self.discarded.total() + self.in_flight, self
