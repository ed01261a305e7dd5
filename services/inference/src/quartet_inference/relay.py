"""The WeightService of a replica: it serves the versions it holds, and passes on the one that it is fetching.

1. Only versions that were verified whole are announced and described as held; what passes through early
   carries its chunks' checksums, and no WeightEnd before this replica has verified everything itself.
2. Who asks for the version that is fetched next waits for its manifest; after START_SECONDS it is told that
   this replica lives and is about to have it, and for how long its publisher may still prepare that, where it
   does. Who asks for one that is passed over, or that is served here without having been fetched, is told so
   at once.
3. Memory: the store's versions and deltas, and the version on its way. Of runs that came by themselves
   HELD_RUNS are held, and of adapters as many as Holdings is given; a follower forgets all but the one whose
   version it serves.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import grpc
from quartet.errors import QuartetError
from quartet.kit.news import News
from quartet.v1 import weights_pb2 as pb
from quartet.weights.arrival import PREPARES, Arrival
from quartet.weights.push import Fits
from quartet.weights.service import WeightServicer
from quartet.weights.sources import SILENT_SECONDS
from quartet.weights.store import WeightStore

#: Replicas hear of a version at once, but some are still busy with the last one. Below what a reader waits.
START_SECONDS = 0.6 * SILENT_SECONDS
#: The run that is served, and the one whose version is to take its place; or the two that pushed last.
HELD_RUNS = 2
#: Runs of pushed adapters, which are small: as many as may be served, and no more than this.
HELD_ADAPTER_RUNS = 32
#: Addresses that a server listens on and nobody can dial.
WILDCARDS = frozenset({"0.0.0.0", "[::]", ""})


class Holdings:
    """What a replica can hand out. For one event loop."""

    def __init__(self, keep: int, delta_bytes: int, adapter_runs: int = 0) -> None:
        """Keep the last versions of a run, and so many bytes of deltas between versions; of runs of adapters
        that came by themselves HELD_RUNS, or more where that is asked for."""
        held = min(max(adapter_runs, HELD_RUNS), HELD_ADAPTER_RUNS)
        self.store = WeightStore(
            keep, delta_bytes=delta_bytes, unopened_runs=HELD_RUNS, unopened_adapters=held
        )
        self._expected: tuple[str, int] | None = None
        self._fetching: tuple[str, int] | None = None
        self._prepares_s: Callable[[], float] = lambda: 0.0
        self._arrival: Arrival | None = None
        #: Served, and not fetched: its weights were there already, and not for others.
        self._without_bytes: tuple[str, int] | None = None
        self._changed = News()

    def expect(self, run_id: str, version: int) -> None:
        """This is the newest, and what is fetched next."""
        self._expected = (run_id, version)
        self._changed.tell()

    def fetching(self, run_id: str, version: int, prepares_s: Callable[[], float] = lambda: 0.0) -> None:
        """This is fetched now, whatever is expected meanwhile; `prepares_s` as of a Route."""
        self._fetching, self._prepares_s, self._without_bytes = (run_id, version), prepares_s, None

    def arriving(self, arrival: Arrival) -> None:
        """This payload is on its way."""
        self._arrival = arrival
        self._changed.tell()

    def settled(self) -> None:
        """What was on its way is held, or given up."""
        self._arrival = self._fetching = None
        self._changed.tell()

    def has_no_bytes_of(self, run_id: str, version: int) -> None:
        """This is served, and will not be fetched: who waits for it here waits in vain."""
        self._without_bytes = (run_id, version)
        self._changed.tell()

    async def arrival(
        self, run_id: str, version: int, fits: Callable[[pb.WeightManifest], bool]
    ) -> Arrival | None:
        """The payload on its way to a version that fits; None where the version is held.

        Errors: NOT_READY where it does not begin to come in time; VERSION_UNKNOWN where it will not.
        """
        try:
            async with asyncio.timeout(START_SECONDS):
                while not self._holds(run_id, version):
                    arrival = self._arrival
                    if arrival is not None and arrival.manifest.run_id == run_id and fits(arrival.manifest):
                        return arrival
                    if self._passes_over(run_id, version):
                        break
                    await self._changed.wait()
                else:
                    return None
        except TimeoutError:
            if (run_id, version) in (self._expected, self._fetching):
                left_s = self._prepares_s() if self._fetching == (run_id, version) else 0.0
                raise QuartetError(
                    "NOT_READY",
                    f"version {version} is about to be fetched here",
                    **({PREPARES: round(left_s * 1000)} if left_s else {}),
                ) from None
        raise QuartetError(
            "VERSION_UNKNOWN",
            f"this replica neither holds nor fetches version {version} of run {run_id}",
            version=version,
            latest=self._expected[1] if self._expected and self._expected[0] == run_id else "",
        )

    def _passes_over(self, run_id: str, version: int) -> bool:
        if self._expected is None or self._fetching == (run_id, version):
            return False
        if self._without_bytes == (run_id, version):
            return True
        return self._expected[0] == run_id and self._expected[1] > version

    def _holds(self, run_id: str, version: int) -> bool:
        try:
            self.store.get(run_id, version)
        except QuartetError:
            return False
        return True


class RelayServicer(WeightServicer):
    """Watch, GetManifest and Fetch over what is held and what is on its way."""

    def __init__(
        self, holdings: Holdings, draining: asyncio.Event, *, accept_push: Fits | None = None
    ) -> None:
        super().__init__(holdings.store, draining, accept_push=accept_push)
        self._holdings = holdings

    async def GetManifest(
        self, request: pb.GetManifestRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetManifestResponse:
        """Describe a version that is held, or the payload that is on its way to it."""
        if not (request.run_id and request.HasField("version")):
            return await super().GetManifest(request, context)

        def fits(manifest: pb.WeightManifest) -> bool:
            full = manifest.version == request.version and not manifest.HasField("base_version")
            return full or _same_base(manifest, request)

        # Whoever asks waits for all of it once.
        until = asyncio.get_running_loop().time() + START_SECONDS
        arrival = await self._holdings.arrival(request.run_id, request.version, fits)
        if arrival is not None:
            return pb.GetManifestResponse(manifest=arrival.manifest)
        try:
            async with asyncio.timeout_at(until):
                return await super().GetManifest(request, context)
        except TimeoutError:
            # The delta is still being made, for those who ask later; the full payload is there.
            return pb.GetManifestResponse(manifest=self._store.get(request.run_id, request.version).manifest)

    async def fetch_encoded(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[bytes, None]:
        """Stream a payload that is held, or the one on its way as it comes."""

        def fits(manifest: pb.WeightManifest) -> bool:
            return manifest.version == request.version and _same_base(manifest, request)

        arrival = await self._holdings.arrival(request.run_id, request.version, fits)
        frames = (
            super().fetch_encoded(request, context)
            if arrival is None
            else arrival.encoded_chunks(request.offset)
        )
        async with aclosing(frames):
            async for frame in frames:
                yield frame


def _same_base(manifest: pb.WeightManifest, request: pb.GetManifestRequest | pb.FetchRequest) -> bool:
    if manifest.HasField("base_version") != request.HasField("base_version"):
        return False
    return (manifest.base_version, manifest.base_digest) == (request.base_version, request.base_digest)


def relay_address(advertised: str, bound: str) -> str:
    """Where others reach a replica that listens on `bound`: as configured, there, or by the host's name."""
    host, _, port = bound.rpartition(":")
    if advertised or bound.startswith("unix:") or host not in WILDCARDS:
        return advertised or bound
    return f"{socket.gethostname()}:{port}"
