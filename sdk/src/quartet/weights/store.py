"""The versions that a publisher or a relay can hand out, and the payloads that lead to them.

1. Bounded: of each run the `keep` versions published last; so many runs as quartet.weights.runs says; deltas
   as quartet.weights.deltas says, none whose base was published more than ANCHOR_EVERY versions ago, and none
   that only leads on by a road as long as a full payload.
2. A version is immutable: publishing it again with equal weights changes nothing, with others is refused.
   A relay (`hold`) follows its publisher instead: where that one went back, what came after is forgotten.
3. A reader that took a version from `get` keeps it alive; eviction only stops it from being found.
4. Safe from any thread: the trainer publishes from its worker while the event loop waits in `wait_newer`.
5. A full payload costs nothing, being views of the tensors. A delta is made when it is asked for the first
   time, one at a time. `road` chooses by bytes: the delta from the reader's base where that version is held,
   else the first delta of the cheapest chain, else the full payload.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from quartet.errors import QuartetError
from quartet.v1 import weights_pb2 as pb
from quartet.weights.delta import Delta, make_delta
from quartet.weights.deltas import DeltaKey, Deltas
from quartet.weights.fetched import Fetched
from quartet.weights.manifest import build_manifest, of_full_payload
from quartet.weights.payload import Payload, full_payload
from quartet.weights.runs import Runs
from quartet.weights.tensor import Tensor
from quartet.weights.versions import Base, Run, Version, check_same
from quartet.weights.waiting import Waiters

T = TypeVar("T")

#: Payloads of deltas one process keeps: 25 of a 7B model with 1 % of its values changed, and some.
DELTA_CACHE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Road:
    """A payload that leads a reader on, and its manifest."""

    manifest: pb.WeightManifest
    payload: Payload


class WeightStore:
    """Versions by run and number."""

    def __init__(
        self,
        keep: int,
        *,
        delta_bytes: int = DELTA_CACHE_BYTES,
        unopened_runs: int | None = None,
        unopened_adapters: int = 0,
    ) -> None:
        if keep < 1:
            raise ValueError(f"a weight store keeps at least one version, not {keep}")
        self._keep = keep
        self._deltas = Deltas(delta_bytes)
        # Held while a delta is made: encoding two at once would only take turns, and need the memory of both.
        self._making = threading.Lock()
        self._runs = Runs(unopened_runs, unopened_adapters, self._forget_deltas)
        # Of the runs, their versions and the deltas.
        self._lock = threading.Lock()
        self._waiters = Waiters()

    def open_run(self, run_id: str) -> None:
        """Make a run known before its first version; watchers of "" follow it from now on. Idempotent."""
        with self._lock:
            self._runs.open(run_id)
            self._waiters.wake()

    def reopen_run(self, run_id: str) -> None:
        """Forget a run's versions and begin anew: whatever comes next is news to everybody who follows it."""
        with self._lock:
            if self._runs.get(run_id) is None:
                self._runs.open(run_id)
            else:
                self._runs.renew(run_id, opened=True)
            self._waiters.wake()

    def close_run(self, run_id: str) -> None:
        """Forget a run and its versions. Idempotent."""
        with self._lock:
            self._runs.close(run_id)
            self._waiters.wake()

    def close_others(self, run_id: str) -> None:
        """Forget every other run and its versions. Idempotent."""
        with self._lock:
            self._runs.close_others(run_id)
            self._waiters.wake()

    def publish(
        self,
        run_id: str,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        canary: pb.Canary | None = None,
        adapter_config: str = "",
    ) -> pb.WeightManifest:
        """Make a version available. Hashes every byte: not for the event loop.

        Errors: SEQUENCE_CONFLICT if this version is held with other weights; OVERLOADED beyond MAX_RUNS runs.
        """
        manifest = build_manifest(run_id, version, tensors, canary=canary, adapter_config=adapter_config)
        return self.commit(Fetched(manifest, dict(tensors))).manifest

    def commit(self, made: Fetched) -> Version:
        """Make a version available that was made elsewhere, and the deltas that led to it; as `publish`."""
        manifest, payload = _handed_on(made)
        run_id, number = manifest.run_id, int(manifest.version)
        with self._lock:
            run = self._runs.get(run_id) or self._runs.create(run_id, adapters=bool(manifest.adapter_config))
            held = run.versions.get(number)
            if held is not None:
                check_same(held.manifest, manifest)
            return self._take(run, held or Version(manifest, made.tensors, payload, run.generation), made)

    def hold(self, fetched: Fetched) -> Version:
        """Hand on a version that was fetched elsewhere, as it is, and the deltas that led to it.

        Errors: OVERLOADED beyond MAX_RUNS runs.
        """
        manifest, payload = _handed_on(fetched)
        run_id, number = manifest.run_id, int(manifest.version)
        with self._lock:
            run = self._runs.get(run_id)
            latest = run.latest if run else None
            held = run.versions.get(number) if run else None
            same = held is not None and held.manifest.digest == manifest.digest
            if run and latest and (number < latest.number or (number == latest.number and not same)):
                # The publisher went back to a saved state: what it had published after that never happened.
                run = self._runs.renew(run_id, opened=run.opened, adapters=run.adapters)
                same = False
            run = run or self._runs.create(run_id, adapters=bool(manifest.adapter_config))
            if not same or held is None:
                held = Version(manifest, fetched.tensors, payload, run.generation)
            return self._take(run, held, fetched)

    def latest(self, run_id: str = "") -> Version | None:
        """The version with the highest number; None before the first. "" means the run opened last.

        Errors: RUN_UNKNOWN.
        """
        with self._lock:
            run = self._runs.find(run_id)
            return run.latest if run else None

    def get(self, run_id: str, version: int | None = None) -> Version:
        """A version that is held; None means the latest. Errors: RUN_UNKNOWN, VERSION_UNKNOWN."""
        with self._lock:
            run = self._runs.find(run_id)
            latest = run.latest if run else None
            found = latest if version is None or run is None else run.versions.get(version)
            if found is None:
                raise QuartetError(
                    "VERSION_UNKNOWN",
                    f"version {'(latest)' if version is None else version} of run {run_id or '(latest)'} "
                    f"is not held; the latest is {latest.number if latest else 'none'}",
                    version="" if version is None else version,
                    latest=latest.number if latest else "",
                )
            return found

    def road(self, run_id: str, version: int | None, base: Base | None) -> Road:
        """The payload of the fewest bytes that leads a reader with this base to a version, or on towards it.

        None means the newest version, to which the road is never a chain. May take seconds where a base is
        given: not for the event loop. Errors: RUN_UNKNOWN, VERSION_UNKNOWN.
        """
        target = self.get(run_id, version)
        road = self._road(target, base, chains=version is not None)
        if isinstance(road, Road):
            return road
        delta = self._delta(road, target)
        if base == (road.number, road.manifest.digest):
            return _shorter(target, delta, delta.payload.size)
        assert base is not None
        spent, first = self._reachable(target, base).get(target.number, (target.payload.size, delta))
        return _shorter(target, first, spent)

    def road_at_hand(self, run_id: str, version: int | None, base: Base | None) -> Road | None:
        """The same; None where a delta has to be made first. Errors: RUN_UNKNOWN, VERSION_UNKNOWN."""
        road = self._road(self.get(run_id, version), base, chains=version is not None)
        return road if isinstance(road, Road) else None

    def _road(self, target: Version, base: Base | None, *, chains: bool) -> Road | Version:
        """The road over what is at hand, or the version from which a delta has to be made first."""
        full = Road(target.manifest, target.payload)
        if base is None:
            return full
        from_base = self._held_base(target, base)
        if from_base is not None:
            with self._lock:
                delta = self._deltas.get(DeltaKey(target.generation, from_base.number, target.number))
            return from_base if delta is None else _shorter(target, delta, delta.payload.size)
        if not chains:
            return full
        reachable = self._reachable(target, base)
        if target.number not in reachable:
            # A chain that leads to an older version that is held goes on from there.
            return self._held_among(target, reachable) or full
        spent, first = reachable[target.number]
        return _shorter(target, first, spent)

    def at_hand(self, run_id: str, version: int, base: Base | None) -> Payload | None:
        """The payload of a manifest that `road` gave; None where it has to be made again.

        Errors: RUN_UNKNOWN, VERSION_UNKNOWN where no base is given.
        """
        if base is None:
            return self.get(run_id, version).payload
        with self._lock:
            run = self._runs.find(run_id)
            delta = self._deltas.get(DeltaKey(run.generation, base[0], version)) if run else None
            return delta.payload if delta is not None and delta.base == base else None

    def payload(self, run_id: str, version: int, base: Base) -> Payload:
        """The same, made again if need be, which may take seconds: not for the event loop.

        Errors: RUN_UNKNOWN, VERSION_UNKNOWN.
        """
        if (payload := self.at_hand(run_id, version, base)) is not None:
            return payload
        with self._lock:
            run = self._runs.find(run_id)
            target = run.versions.get(version) if run else None
        from_base = self._held_base(target, base) if target else None
        if target is None or from_base is None:
            raise QuartetError(
                "VERSION_UNKNOWN",
                f"no payload from version {base[0]} to {version} is held; ask for a manifest again",
                version=base[0],
                latest=version,
            )
        return self._delta(from_base, target).payload

    async def wait_newer(self, run_id: str, held: int | None, told: Version | None = None) -> Version:
        """Wait, without a bound of its own, for a version newer than `held`, and return the newest.

        A held number says nothing about another run, or about one that was closed and opened again: any
        version of those is news. `told` is what the caller was given last; without it, `held` belongs to the
        run as it is now.
        Errors: RUN_UNKNOWN at once or when the run is closed; an empty run_id waits for the first run.
        """
        with self._lock:
            run = self._runs.find(run_id)
            generation = told.generation if told else run.generation if run else 0

        def newer() -> Version | None:
            latest = self.latest(run_id)
            news = latest and (held is None or latest.number > held or latest.generation != generation)
            return latest if news else None

        return await self._waiters.until(newer)

    async def wait_arrived(self, choose: Callable[[dict[int, Version]], T | None]) -> T:
        """What is chosen of the newest version of every run, now or when another one has come: by the time of
        its arrival and in that order. One that arrives again has another time."""

        def chosen() -> T | None:
            with self._lock:
                runs = self._runs.by_arrival()
                return choose({run.taken: run.latest for run in runs if run.latest is not None})

        return await self._waiters.until(chosen)

    def _take(self, run: Run, version: Version, made: Fetched) -> Version:
        run.take(version, self._keep, [int(delta.manifest.version) for delta in made.deltas[:-1]])
        self._runs.took(version.run_id)
        for delta in made.deltas:
            self._keep_delta(run, delta)
        self._deltas.forget(lambda key: key.generation == run.generation and key.base not in run.history)
        self._deltas.forget_detours(run.generation, run.versions, version.payload.size)
        self._waiters.wake()
        return version

    def _held_base(self, target: Version, base: Base) -> Version | None:
        """The version that a reader says it holds, if it is held here with the same weights."""
        with self._lock:
            run = self._runs.get(target.run_id)
            held = run.versions.get(base[0]) if run and run.generation == target.generation else None
            return held if held and held.manifest.digest == base[1] else None

    def _held_among(self, target: Version, numbers: Collection[int]) -> Version | None:
        """The newest of these versions that is held."""
        with self._lock:
            run = self._runs.get(target.run_id)
            if run is None or run.generation != target.generation:
                return None
            return max(
                (held for number, held in run.versions.items() if number in numbers),
                key=lambda held: held.number,
                default=None,
            )

    def _reachable(self, target: Version, base: Base) -> dict[int, tuple[int, Delta]]:
        """The versions that deltas at hand lead to from a reader's base."""
        with self._lock:
            return self._deltas.reachable(target.generation, base)

    def _delta(self, base: Version, new: Version) -> Delta:
        """The delta between two versions that are held, made if need be."""
        key = DeltaKey(new.generation, base.number, new.number)
        with self._making:
            with self._lock:
                delta = self._deltas.get(key)
            if delta is None:
                delta = make_delta(base, new)
                with self._lock:
                    run = self._runs.get(new.run_id)
                    if run and run.generation == new.generation:
                        delta = self._keep_delta(run, delta)
            return delta

    def _keep_delta(self, run: Run, delta: Delta) -> Delta:
        return self._deltas.add(DeltaKey(run.generation, delta.base[0], int(delta.manifest.version)), delta)

    def _forget_deltas(self, run: Run) -> None:
        self._deltas.forget(lambda key: key.generation == run.generation)


def _shorter(target: Version, first: Delta, spent: int) -> Road:
    """By this delta, on a road of so many bytes, or by the full payload where that is no longer."""
    shorter = spent < target.payload.size
    return Road(first.manifest, first.payload) if shorter else Road(target.manifest, target.payload)


def _handed_on(made: Fetched) -> tuple[pb.WeightManifest, Payload]:
    """The full payload of a version, and the manifest of that. Whoever made the version may have written
    another header before equal tensors: by another library, in another order."""
    manifest, payload = made.manifest, full_payload(made.tensors)
    return (manifest if manifest.payload_bytes == payload.size else of_full_payload(manifest)), payload
