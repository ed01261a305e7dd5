"""WeightService over a WeightStore: the trainer serves what it published, an inference replica what it holds.

1. Read-only: no request changes the store; Push is not served.
2. Every payload is a full one: a caller that names a base gets a manifest without base_version.
3. A Fetch keeps its version alive until its stream ends, evicted or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from quartet.errors import QuartetError, unimplemented
from quartet.kit.stream import with_heartbeats
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc
from quartet.weights.payload import Payload, chunks
from quartet.weights.store import Version, WeightStore
from quartet.weights.tree import RelayTree

SERVICE = pb.DESCRIPTOR.services_by_name["WeightService"].full_name


class WeightServicer(rpc.WeightServiceServicer):
    """Watch, GetManifest and Fetch."""

    def __init__(self, store: WeightStore, draining: asyncio.Event | None = None) -> None:
        """`draining` (health.draining) ends every Watch: its caller has nothing to lose."""
        self._store, self._draining = store, draining
        self._relays = RelayTree()

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
        """Describe a version and its full payload."""
        version = request.version if request.HasField("version") else None
        return pb.GetManifestResponse(manifest=self._store.get(request.run_id, version).manifest)

    async def Fetch(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FetchResponse]:
        """Stream the payload from an offset; at the very end of it, only WeightEnd."""
        payload = self._payload(request)
        for chunk in chunks(payload, request.offset):
            yield pb.FetchResponse(chunk=chunk)
        yield pb.FetchResponse(end=payload.end())

    async def fetch_encoded(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Fetch, already serialized: what `add_weight_service` registers."""
        payload = self._payload(request)
        for message in payload.encoded_chunks(request.offset):
            yield message
        yield pb.FetchResponse(end=payload.end()).SerializeToString()

    def _payload(self, request: pb.FetchRequest) -> Payload:
        payload = self._store.get(request.run_id, request.version).payload
        if request.HasField("base_version"):
            raise QuartetError(
                "VERSION_UNKNOWN",
                f"no payload relative to version {request.base_version} is held; fetch without base_version",
                version=request.base_version,
                latest=request.version,
            )
        if request.offset > payload.size:
            raise QuartetError(
                "OFFSET_OUT_OF_RANGE",
                f"offset {request.offset} lies past the {payload.size} bytes of the payload; begin at 0",
                offset=request.offset,
                size=payload.size,
            )
        return payload

    async def Push(
        self, request_iterator: AsyncIterator[pb.PushRequest], context: grpc.aio.ServicerContext
    ) -> pb.PushResponse:
        """Not served by this build."""
        raise unimplemented("WeightService.Push")


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
            servicer.fetch_encoded, pb.FetchRequest.FromString, None
        ),
        "Push": grpc.stream_unary_rpc_method_handler(
            servicer.Push, pb.PushRequest.FromString, pb.PushResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
