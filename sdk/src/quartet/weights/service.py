"""WeightService over a WeightStore: the trainer serves what it published, an inference replica what it holds.

1. No request but Push changes the store, and Push is refused unless the servicer was made to take it: by a
   replica that follows nobody, for a foreign trainer (quartet.weights.push).
2. A caller that names a base by number and digest gets the road of the fewest bytes from there
   (quartet.weights.store), any other the full payload. Deltas are made in one thread of their own; whoever
   needs none that has to be made waits for none.
3. A Fetch keeps its payload alive, evicted or not, until its stream ends or its reader stops taking it
   (quartet.weights.taking).
4. A caller that asks for it is told where the payload lies in shared memory, if it fits there.
5. What is hashed, or made again, before a Fetch can begin takes its time: its reader hears so, as of a relay
   that waits (quartet.weights.arrival).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from quartet.errors import QuartetError
from quartet.kit.stream import with_heartbeats
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc
from quartet.weights import arrival
from quartet.weights.payload import Payload, chunks
from quartet.weights.push import GO_AHEAD, Fits, Pushes
from quartet.weights.shared import SharedPayloads
from quartet.weights.store import WeightStore
from quartet.weights.taking import while_taken
from quartet.weights.tree import RelayTree
from quartet.weights.versions import Base, Version

T = TypeVar("T")

SERVICE = pb.DESCRIPTOR.services_by_name["WeightService"].full_name


class WeightServicer(rpc.WeightServiceServicer):
    """Watch, GetManifest, Fetch and, where it is taken, Push."""

    def __init__(
        self, store: WeightStore, draining: asyncio.Event | None = None, *, accept_push: Fits | None = None
    ) -> None:
        """`draining` (health.draining) ends every Watch: its caller has nothing to lose.

        `accept_push`: take what it does not refuse; absent: take nothing.
        """
        self._store, self._draining = store, draining
        self._relays = RelayTree()
        self._pushes = Pushes(store, accept_push) if accept_push else None
        self._shared = SharedPayloads()
        # One thread each: whoever waits for a delta or a copy holds none of the threads that others need.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="weight-deltas")
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="weight-copies")

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchResponse]:
        """Announce the newest version, then each newer one; several at once count as one."""
        watcher = self._relays.join(request.run_id, request.relay_address)

        def heartbeat() -> pb.WatchResponse:
            latest = self._store.latest(request.run_id)
            alive = pb.WatchHeartbeat(latest_version=latest.number) if latest else pb.WatchHeartbeat()
            return pb.WatchResponse(heartbeat=alive)

        async def announcements() -> AsyncIterator[pb.WatchResponse]:
            held = request.held_version if request.HasField("held_version") else None
            told: Version | None = None
            while True:
                told = await self._store.wait_newer(request.run_id, told.number if told else held, told)
                announced = told.announced()
                announced.sources.extend(self._relays.sources(watcher))
                yield pb.WatchResponse(announced=announced)

        try:
            async for response in with_heartbeats(announcements(), heartbeat, until=self._draining):
                yield response
        finally:
            self._relays.leave(watcher)

    async def GetManifest(
        self, request: pb.GetManifestRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetManifestResponse:
        """Describe a version and the payload that leads the caller there."""
        version = request.version if request.HasField("version") else None
        asked = (request.run_id, version, _base(request))
        # What is at hand does not wait for the thread, in which another delta may be made.
        road = self._store.road_at_hand(*asked)
        if road is None:
            road = await self._in_thread(self._store.road, *asked)
        offer = None
        if request.shared_memory:
            loop = asyncio.get_running_loop()
            offer = await loop.run_in_executor(self._copier, self._shared.offer, road.payload)
        return pb.GetManifestResponse(manifest=road.manifest, shared=offer)

    async def Fetch(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FetchResponse]:
        """Stream the payload from an offset; at the very end of it, only WeightEnd."""
        payload = await self._payload(request)
        for chunk in chunks(payload, request.offset):
            yield pb.FetchResponse(chunk=chunk)
        yield pb.FetchResponse(end=payload.end())

    async def fetch_encoded(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[bytes, None]:
        """Fetch, already serialized: what `add_weight_service` registers."""
        found = asyncio.create_task(self._payload(request))
        try:
            while not (await asyncio.wait({found}, timeout=arrival.SIGN_SECONDS))[0]:
                yield arrival.sign_of_life(request.offset)
        finally:
            found.cancel()
        payload = found.result()
        for message in payload.encoded_chunks(request.offset):
            yield message
        yield pb.FetchResponse(end=payload.end()).SerializeToString()

    async def _payload(self, request: pb.FetchRequest) -> Payload:
        asked = (request.run_id, request.version, _base(request))
        # What is at hand does not wait for the thread, in which another delta may be made.
        payload = self._store.at_hand(*asked)
        if payload is None:
            payload = await self._in_thread(self._store.payload, *asked)
        if request.offset > payload.size:
            raise QuartetError(
                "OFFSET_OUT_OF_RANGE",
                f"offset {request.offset} lies past the {payload.size} bytes of the payload; begin at 0",
                offset=request.offset,
                size=payload.size,
            )
        await asyncio.to_thread(payload.digests)
        return payload

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work, *arguments)

    async def Push(
        self, request_iterator: AsyncIterator[pb.PushRequest], context: grpc.aio.ServicerContext
    ) -> pb.PushResponse:
        """Take a version of a foreign trainer, where such are taken."""
        return await self.push_encoded((one.SerializeToString() async for one in request_iterator), context)

    async def push_encoded(
        self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> pb.PushResponse:
        """Push, still serialized: what `add_weight_service` registers."""
        if self._pushes is None:
            raise QuartetError(
                "NOT_IMPLEMENTED",
                "this service takes no versions; push to a replica of inference with accept_push = true",
                rpc="WeightService.Push",
            )
        return await self._pushes.receive(messages, lambda: context.send_initial_metadata(((GO_AHEAD, "1"),)))


def _base(request: pb.GetManifestRequest | pb.FetchRequest) -> Base | None:
    return (int(request.base_version), request.base_digest) if request.HasField("base_version") else None


def add_weight_service(servicer: WeightServicer, server: grpc.aio.Server) -> None:
    """Register like the generated function, but Fetch without protobuf's copies (quartet.weights.frames)."""
    handlers = {
        "Watch": grpc.unary_stream_rpc_method_handler(
            servicer.Watch, pb.WatchRequest.FromString, pb.WatchResponse.SerializeToString
        ),
        "GetManifest": grpc.unary_unary_rpc_method_handler(
            servicer.GetManifest, pb.GetManifestRequest.FromString, pb.GetManifestResponse.SerializeToString
        ),
        "Fetch": grpc.unary_stream_rpc_method_handler(
            while_taken(servicer.fetch_encoded), pb.FetchRequest.FromString, None
        ),
        "Push": grpc.stream_unary_rpc_method_handler(
            servicer.push_encoded, None, pb.PushResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
