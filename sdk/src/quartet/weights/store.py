"""The versions that a publisher or a relay can hand out.

1. Bounded: of each run the `keep` versions published last; never more than MAX_RUNS runs.
2. A version is immutable: publishing it again with equal weights changes nothing, with others is refused.
3. A reader that took a version from `get` keeps it alive; eviction only stops it from being found.
4. Safe from any thread: the trainer publishes from its worker while the event loop waits in `wait_newer`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count

from quartet.errors import QuartetError
from quartet.v1 import weights_pb2 as pb
from quartet.weights.manifest import build_manifest
from quartet.weights.payload import Payload, full_payload
from quartet.weights.tensor import Tensor

#: Runs one process can publish for at once; each pins `keep` copies of a model.
MAX_RUNS = 64


@dataclass(frozen=True, slots=True)
class Version:
    """One version that is held."""

    manifest: pb.WeightManifest
    tensors: Mapping[str, Tensor]
    payload: Payload
    #: Which opening of the run it belongs to: numbers of a run that was closed and opened again start anew.
    generation: int

    @property
    def run_id(self) -> str:
        """The run."""
        return str(self.manifest.run_id)

    @property
    def number(self) -> int:
        """The version's number."""
        return int(self.manifest.version)

    def announced(self) -> pb.VersionAnnounced:
        """What Watch says of it."""
        return pb.VersionAnnounced(run_id=self.run_id, version=self.number, digest=self.manifest.digest)


@dataclass(slots=True, eq=False)
class _Run:
    generation: int
    #: In the order of publishing.
    versions: dict[int, Version] = field(default_factory=dict)

    @property
    def latest(self) -> Version | None:
        return self.versions[max(self.versions)] if self.versions else None


@dataclass(slots=True, eq=False)
class _Waiter:
    loop: asyncio.AbstractEventLoop
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        # A loop that was closed while we published has nobody left to wake.
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.woken.set)


class WeightStore:
    """Versions by run and number."""

    def __init__(self, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"a weight store keeps at least one version, not {keep}")
        self._keep = keep
        # In the order of their creation or opening.
        self._runs: dict[str, _Run] = {}
        self._generations = count(1)
        self._lock = threading.Lock()
        self._waiters: set[_Waiter] = set()

    def open_run(self, run_id: str) -> None:
        """Make a run known before its first version; watchers of "" follow it from now on. Idempotent."""
        with self._lock:
            if run_id in self._runs:
                self._runs[run_id] = self._runs.pop(run_id)
            else:
                self._create(run_id)
            self._wake()

    def reopen_run(self, run_id: str) -> None:
        """Forget a run's versions and begin anew: whatever comes next is news to everybody who follows it."""
        with self._lock:
            if run_id in self._runs:
                # In its place: it does not become the run that was opened last.
                self._runs[run_id] = _Run(next(self._generations))
            else:
                self._create(run_id)
            self._wake()

    def close_run(self, run_id: str) -> None:
        """Forget a run and its versions. Idempotent."""
        with self._lock:
            self._runs.pop(run_id, None)
            self._wake()

    def publish(self, run_id: str, version: int, tensors: Mapping[str, Tensor]) -> pb.WeightManifest:
        """Make a version available. Hashes every byte: not for the event loop.

        Errors: SEQUENCE_CONFLICT if this version is held with other weights; OVERLOADED beyond MAX_RUNS runs.
        """
        manifest, payload = build_manifest(run_id, version, tensors), full_payload(tensors)
        with self._lock:
            run = self._runs.get(run_id) or self._create(run_id)
            held = run.versions.get(version)
            if held is not None and held.manifest.digest != manifest.digest:
                raise QuartetError(
                    "SEQUENCE_CONFLICT",
                    f"version {version} of run {run_id} is held with other weights; versions are immutable",
                    have=held.manifest.digest.hex(),
                    want=manifest.digest.hex(),
                )
            # Taken out first, so that a repeated version counts as published last.
            run.versions.pop(version, None)
            run.versions[version] = held or Version(manifest, dict(tensors), payload, run.generation)
            while len(run.versions) > self._keep:
                del run.versions[next(iter(run.versions))]
            self._wake()
            return run.versions[version].manifest

    def latest(self, run_id: str = "") -> Version | None:
        """The version with the highest number; None before the first. "" means the run opened last.

        Errors: RUN_UNKNOWN.
        """
        with self._lock:
            run = self._run(run_id)
            return run.latest if run else None

    def get(self, run_id: str, version: int | None = None) -> Version:
        """A version that is held; None means the latest. Errors: RUN_UNKNOWN, VERSION_UNKNOWN."""
        with self._lock:
            run = self._run(run_id)
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

    async def wait_newer(self, run_id: str, held: int | None, told: Version | None = None) -> Version:
        """Wait, without a bound of its own, for a version newer than `held`, and return the newest.

        A held number says nothing about another run, or about one that was closed and opened again: any
        version of those is news. `told` is what the caller was given last; without it, `held` belongs to the
        run as it is now.
        Errors: RUN_UNKNOWN at once or when the run is closed; an empty run_id waits for the first run.
        """
        waiter = _Waiter(asyncio.get_running_loop())
        with self._lock:
            run = self._run(run_id)
            generation = told.generation if told else run.generation if run else 0
            self._waiters.add(waiter)
        try:
            while True:
                waiter.woken.clear()
                latest = self.latest(run_id)
                if latest and (held is None or latest.number > held or latest.generation != generation):
                    return latest
                await waiter.woken.wait()
        finally:
            with self._lock:
                self._waiters.discard(waiter)

    def _run(self, run_id: str) -> _Run | None:
        if not run_id:
            return next(reversed(self._runs.values()), None)
        if run_id not in self._runs:
            raise QuartetError("RUN_UNKNOWN", f"run {run_id} is not published here", run_id=run_id)
        return self._runs[run_id]

    def _create(self, run_id: str) -> _Run:
        if not run_id:
            raise QuartetError("INVALID_REQUEST", "a run needs a name", field="run_id", value="")
        if len(self._runs) >= MAX_RUNS:
            raise QuartetError("OVERLOADED", f"{MAX_RUNS} runs are published already; close one first")
        run = self._runs[run_id] = _Run(next(self._generations))
        return run

    def _wake(self) -> None:
        for waiter in self._waiters:
            waiter.wake()
