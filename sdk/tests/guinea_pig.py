"""A WeightService that does what it is told, for the tests of quartet.kit over real loopback gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import structlog
from quartet.errors import QuartetError
from quartet.kit import context as request_context
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.options import MAX_MESSAGE_BYTES
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc

NAME = "quartet.v1.WeightService"


class GuineaPig(rpc.WeightServiceServicer):
    """Does what the run id tells it to do."""

    def __init__(self) -> None:
        self.calls = 0
        self.pushed: list[int] = []
        self.seen: dict[str, Any] = {}
        self.entered = asyncio.Event()
        self.left = asyncio.Event()
        self.release = asyncio.Event()
        self.next_hop: Callable[[], Any] | None = None
        self.in_memory: weakref.ref[Any] | None = None

    async def GetManifest(self, request: Any, context: Any) -> Any:
        self.calls += 1
        self.entered.set()
        self.seen = dict(structlog.contextvars.get_contextvars())
        self.seen["remaining_s"] = request_context.remaining_s()
        samples = {1}  # of a type that can be referred to weakly
        self.in_memory = weakref.ref(samples)
        match request.run_id:
            case "typed":
                raise QuartetError("RUN_UNKNOWN", "no such run", run_id="typed")
            case "crash":
                raise KeyError("/secret/path")
            case "flaky" if self.calls < 3:
                raise QuartetError("OVERLOADED", "full", retry_after_ms=1)
            case "huge":
                manifest = pb.WeightManifest(digest=bytes(MAX_MESSAGE_BYTES + 1))
                return pb.GetManifestResponse(manifest=manifest)
            case "hold":
                try:
                    await self.release.wait()
                finally:
                    self.left.set()
            case "hop":
                assert self.next_hop is not None
                return await self.next_hop()
        return pb.GetManifestResponse()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        samples = {1}
        self.in_memory = weakref.ref(samples)
        try:
            yield pb.WatchResponse(announced=pb.VersionAnnounced(version=1))
            if request.run_id == "typed":
                raise QuartetError("RUN_UNKNOWN", "no such run", run_id="typed")
            if request.run_id == "crash":
                raise KeyError("/secret/path")
            if request.run_id == "huge":
                yield pb.WatchResponse(announced=pb.VersionAnnounced(digest=bytes(MAX_MESSAGE_BYTES + 1)))
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def Push(self, requests: Any, context: Any) -> Any:
        sizes = [len(request.chunk.data) async for request in requests]
        self.pushed += sizes
        return pb.PushResponse(version=len(sizes))


@contextlib.asynccontextmanager
async def served(**config: Any) -> AsyncIterator[tuple[GuineaPig, Any, RunningServer]]:
    """It, a stub of it, and its server."""
    pig = GuineaPig()
    service = Service(NAME, rpc.add_WeightServiceServicer_to_server, pig)
    running = await start([service], ServerConfig(**config), Health())
    async with connect(running.address) as channel:
        try:
            yield pig, rpc.WeightServiceStub(channel), running
        finally:
            await running.stop(0)


def ask(run_id: str = "") -> Any:
    return pb.GetManifestRequest(run_id=run_id)


async def failure(awaitable: Any) -> QuartetError:
    with pytest.raises(QuartetError) as caught:
        await awaitable
    return caught.value


async def drained(responses: AsyncIterator[Any]) -> list[Any]:
    return [response async for response in responses]


def raw(running: RunningServer) -> Any:
    """A channel without our limits: what a careless or hostile peer has."""
    return grpc.aio.insecure_channel(
        running.address, options=[("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    )
