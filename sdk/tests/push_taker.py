"""A replica that takes pushes, and what is pushed to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import numpy as np
from loopback import LOOPBACK
from quartet.errors import from_rpc
from quartet.kit.health import Health
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc
from quartet.weights.frames import PUSH_CHUNK
from quartet.weights.manifest import build_manifest
from quartet.weights.payload import full_payload
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor


def model(seed: int = 0) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    shapes = {"embed": (700, 512), "layer": (512, 512), "norm": (512,), "scalar": ()}
    return {
        name: Tensor("F32", shape, np.asarray(rng.random(shape, np.float32)).data)
        for name, shape in shapes.items()
    }


def frames(version: int = 1, seed: int = 0) -> list[pb.PushRequest]:
    payload = full_payload(model(seed))
    chunks = [pb.PushRequest.FromString(one) for one in payload.encoded_chunks(0, PUSH_CHUNK)]
    manifest = build_manifest("r", version, model(seed))
    return [pb.PushRequest(manifest=manifest), *chunks, pb.PushRequest(commit=payload.end())]


def take(manifest: pb.WeightManifest) -> None:
    """Whatever comes."""


async def serve(store: WeightStore, accept: bool = True, generated: bool = False) -> RunningServer:
    return await offer(WeightServicer(store, accept_push=take if accept else None), generated)


async def offer(servicer: WeightServicer, generated: bool = False) -> RunningServer:
    register = rpc.add_WeightServiceServicer_to_server if generated else add_weight_service
    config = ServerConfig(address=f"{LOOPBACK}:0")
    return await start([Service(SERVICE, register, servicer)], config, Health())


async def until_under_way(servicer: WeightServicer, count: int) -> None:
    """Wait until the server has so many uploads under way."""
    pushes = servicer._pushes
    assert pushes is not None, "it takes them"
    async with asyncio.timeout(20):
        while len(pushes._staged_bytes) != count:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)


class Taker:
    """A replica that takes pushes, and a channel to it."""

    def __init__(self, servicer: WeightServicer, address: str, channel: grpc.aio.Channel) -> None:
        self.servicer, self.store = servicer, servicer._store
        self.address, self.channel = address, channel

    async def send(self, requests: Iterator[pb.PushRequest]) -> pb.PushResponse:
        """By a client that waits for nothing; grpc.aio's would lose statuses that come while it writes."""

        def blocking() -> pb.PushResponse:
            with grpc.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
                stub = rpc.WeightServiceStub(channel)  # type: ignore[no-untyped-call]
                return stub.Push(requests, timeout=20)

        try:
            return await asyncio.to_thread(blocking)
        except grpc.RpcError as error:
            raise from_rpc(error) from None

    def versions(self) -> list[int]:
        run = self.store._runs.get("r")
        return sorted(run.versions) if run else []
