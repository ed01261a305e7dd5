"""The deltas that a publisher has at hand, and the cheapest road to a version.

1. Bounded: `limit_bytes` of payloads, the oldest go first; the one made last is always kept.
2. A delta leads from one version of a run's generation to another; within a generation a version is
   immutable, so the same key always means the same bytes.
3. `reachable` finds the roads of the fewest bytes over the deltas at hand. It makes none.
4. What no road of fewer bytes than a full payload leads over is of no use (`forget_detours`): a chain only
   grows, and from where it leads to there is no shorter way later.
5. Not thread-safe: whoever owns it holds a lock. Making a delta needs no lock (quartet.weights.delta).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import count

from quartet.weights.delta import Delta


@dataclass(frozen=True, slots=True)
class DeltaKey:
    """Which generation, from which version to which."""

    generation: int
    base: int
    version: int


class Deltas:
    """Deltas by generation, base and version."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        # In the order in which they were added.
        self._held: dict[DeltaKey, Delta] = {}

    def get(self, key: DeltaKey) -> Delta | None:
        """The delta, where it is at hand."""
        return self._held.get(key)

    def add(self, key: DeltaKey, delta: Delta) -> Delta:
        """Keep a delta; return the one that is kept under this key."""
        kept = self._held.setdefault(key, delta)
        while self.nbytes > self._limit_bytes and len(self._held) > 1:
            del self._held[next(iter(self._held))]
        return kept

    def forget(self, unwanted: Callable[[DeltaKey], bool]) -> None:
        """Drop every delta that is unwanted."""
        for key in [key for key in self._held if unwanted(key)]:
            del self._held[key]

    def forget_detours(self, generation: int, held: Collection[int], full_bytes: int) -> None:
        """Drop deltas of a generation that only lead on to a version in `held`, from which new deltas can be
        made, by a road that is not shorter than a full payload."""
        into: dict[int, list[tuple[DeltaKey, int]]] = {}
        for key, delta in self._held.items():
            if key.generation == generation:
                into.setdefault(key.version, []).append((key, delta.payload.size))
        near = {number: 0 for number in held}
        queue = [(0, number) for number in held]
        while queue:
            spent, version = heapq.heappop(queue)
            for key, size in into.get(version, ()):
                if spent + size < near.get(key.base, full_bytes):
                    near[key.base] = spent + size
                    heapq.heappush(queue, (spent + size, key.base))
        self.forget(
            lambda key: (
                key.generation == generation
                and near.get(key.version, full_bytes) + self._held[key].payload.size >= full_bytes
            )
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads."""
        return sum(delta.payload.size for delta in self._held.values())

    def reachable(self, generation: int, base: tuple[int, bytes]) -> dict[int, tuple[int, Delta]]:
        """Every version that deltas lead to from `base`: the bytes of the cheapest road, its first delta."""
        steps: dict[int, list[Delta]] = {}
        for key, delta in self._held.items():
            if key.generation == generation:
                steps.setdefault(key.base, []).append(delta)
        found: dict[int, tuple[int, Delta]] = {}
        queue: list[tuple[int, int, int, Delta]] = []
        tie = count()

        def look_on(spent: int, first: Delta | None, deltas: Iterable[Delta]) -> None:
            for delta in deltas:
                entry = (spent + delta.payload.size, next(tie), int(delta.manifest.version), first or delta)
                heapq.heappush(queue, entry)

        look_on(0, None, [delta for delta in steps.get(base[0], []) if delta.base == base])
        while queue:
            spent, _, version, first = heapq.heappop(queue)
            if version not in found and version != base[0]:
                found[version] = (spent, first)
                look_on(spent, first, steps.get(version, []))
        return found
