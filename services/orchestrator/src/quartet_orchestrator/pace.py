"""Pace: which place of which batch may be filled next, and how stale a token may be.

Batch s trains the policy of s steps to that of s + 1. K is `max_off_policy_steps`. A step is n optimizer
steps (`versions_per_step`), so the version of s steps is n * s; below, versions are counted in steps.

1. A place of batch s is given out only while the published version is at least s - K (admission).
2. Its rollouts ask the engine for at least `min_policy_version(s)` = max(0, s - K). So a token of version v
   that is trained in batch s has 0 <= s - v <= K. docs/staleness.md has the proof; tests/test_orch_pace.py
   tests it as a property. (The method gives it as the engine counts, n for each step.)
3. Places are given out in order, each to one group at a time; a place that its group gave back is given out
   again, first.
4. At most (K + 1) batches are under way at once.
5. `violation` checks 2 on what really came back, because a bound that is only promised is not a bound.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Place:
    """Where a group goes: the batch, from 0, and its place in it, from 0."""

    batch: int
    index: int


class Pace:
    """Gives out the places of a run's batches, of which batch `published` is the first."""

    def __init__(
        self,
        *,
        max_off_policy_steps: int,
        groups_per_batch: int,
        max_steps: int,
        published: int = 0,
        versions_per_step: int = 1,
    ) -> None:
        assert max_off_policy_steps >= 0 and groups_per_batch > 0 and max_steps >= 0 and published >= 0
        self.max_off_policy_steps = max_off_policy_steps
        self.groups_per_batch = groups_per_batch
        self.max_steps = max_steps
        self.versions_per_step = versions_per_step
        self.published = published
        self._given_back: list[Place] = []
        # The next place that no group has had yet.
        self._next = Place(published, 0)

    def admits(self, batch: int) -> bool:
        """Whether places of the batch may be given out now; never after the last step."""
        return batch < self.max_steps and self.published >= batch - self.max_off_policy_steps

    def min_policy_version(self, batch: int) -> int:
        """The oldest version that may sample for the batch, as the engine counts versions."""
        return max(0, batch - self.max_off_policy_steps) * self.versions_per_step

    def take(self) -> Place | None:
        """The first free place that is admitted now, or None."""
        if self._given_back:
            # It was admitted before and the published version never shrinks.
            return heapq.heappop(self._given_back)
        place = self._next
        if not self.admits(place.batch):
            return None
        last = place.index + 1 == self.groups_per_batch
        self._next = Place(place.batch + 1, 0) if last else Place(place.batch, place.index + 1)
        return place

    def give_back(self, place: Place) -> None:
        """The place's group was discarded."""
        assert place < self._next and place not in self._given_back, place
        heapq.heappush(self._given_back, place)

    def restore(self, occupied: Iterable[Place]) -> None:
        """Takes the places that groups hold already, after a restart and before any other is taken; those
        skipped between them are free again."""
        held = set(occupied)
        last = max(held, default=None)
        skipped = []
        while last is not None and self._next <= last:
            place = self.take()
            assert place is not None, f"{last} is held but not admitted at version {self.published}"
            if place not in held and place.batch >= self.published:
                skipped.append(place)
        for place in skipped:
            self.give_back(place)

    def publish(self, version: int) -> None:
        """A version is out; it is counted in steps and never shrinks."""
        assert version >= self.published, f"version {version} after {self.published}"
        self.published = version

    def violation(self, batch: int, versions: Iterable[int]) -> str | None:
        """Why tokens of these versions may not be trained in the batch, as a reason for the ledger, or
        None."""
        for version in versions:
            steps, between = divmod(version, self.versions_per_step)
            if batch - steps > self.max_off_policy_steps:
                return "stale"
            if steps > batch or between:
                # No such version is published before the batch is trained: the stamp is wrong.
                return "version_unpublished"
        return None
