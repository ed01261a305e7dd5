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
        # Runs in the order of their creation or opening; versions of a run in the order of publishing.
        self._runs: dict[str, dict[int, Version]] = {}
        self._lock = threading.Lock()
        self._waiters: set[_Waiter] = set()

    def open_run(self, run_id: str) -> None:
        """Make a run known before its first version; watchers of "" follow it from now on. Idempotent."""
        with self._lock:
            versions = self._runs.pop(run_id, None)
            self._create(run_id, versions)
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
        new = Version(build_manifest(run_id, version, tensors), dict(tensors), full_payload(tensors))
        with self._lock:
            held = self._runs.get(run_id, {}).get(version)
            if held is not None and held.manifest.digest != new.manifest.digest:
                raise QuartetError(
                    "SEQUENCE_CONFLICT",
                    f"version {version} of run {run_id} is held with other weights; versions are immutable",
                    have=held.manifest.digest.hex(),
                    want=new.manifest.digest.hex(),
                )
            versions = self._runs[run_id] if run_id in self._runs else self._create(run_id)
            # Taken out first, so that a repeated version counts as published last.
            versions.pop(version, None)
            versions[version] = held or new
            while len(versions) > self._keep:
                del versions[next(iter(versions))]
            self._wake()
            return versions[version].manifest

    def latest(self, run_id: str = "") -> Version | None:
        """The version with the highest number; None before the first. "" means the run opened last.

        Errors: RUN_UNKNOWN.
        """
        with self._lock:
            return self._latest(run_id)

    def get(self, run_id: str, version: int | None = None) -> Version:
        """A version that is held; None means the latest. Errors: RUN_UNKNOWN, VERSION_UNKNOWN."""
        with self._lock:
            latest = self._latest(run_id)
            found = latest if version is None else self._runs[latest.run_id].get(version) if latest else None
            if found is None:
                raise QuartetError(
                    "VERSION_UNKNOWN",
                    f"version {'(latest)' if version is None else version} of run {run_id or '(latest)'} "
                    f"is not held; the latest is {latest.number if latest else 'none'}",
                    version="" if version is None else version,
                    latest=latest.number if latest else "",
                )
            return found

    async def wait_newer(self, run_id: str, held: int | None, held_run: str = "") -> Version:
        """Wait, without a bound of its own, for a version newer than `held`, and return the newest.

        An empty run_id follows the run created last: any version of a run other than `held_run` is news.
        Errors: RUN_UNKNOWN at once or when the run is closed; an empty run_id waits for the first run.
        """
        waiter = _Waiter(asyncio.get_running_loop())
        if not held_run:
            latest = self.latest(run_id)
            held_run = latest.run_id if latest else ""
        with self._lock:
            self._waiters.add(waiter)
        try:
            while True:
                waiter.woken.clear()
                latest = self.latest(run_id)
                if latest and (held is None or latest.number > held or latest.run_id != held_run):
                    return latest
                await waiter.woken.wait()
        finally:
            with self._lock:
                self._waiters.discard(waiter)

    def _latest(self, run_id: str) -> Version | None:
        if not run_id:
            if not self._runs:
                return None
            run_id = next(reversed(self._runs))
        if run_id not in self._runs:
            raise QuartetError("RUN_UNKNOWN", f"run {run_id} is not published here", run_id=run_id)
        versions = self._runs[run_id]
        return versions[max(versions)] if versions else None

    def _create(self, run_id: str, versions: dict[int, Version] | None = None) -> dict[int, Version]:
        if not run_id:
            raise QuartetError("INVALID_REQUEST", "a run needs a name", field="run_id", value="")
        if len(self._runs) >= MAX_RUNS:
            raise QuartetError("OVERLOADED", f"{MAX_RUNS} runs are published already; close one first")
        return self._runs.setdefault(run_id, versions or {})

    def _wake(self) -> None:
        for waiter in self._waiters:
            waiter.wake()
