"""A publisher of weights that tears, damages and lies on cue, and a channel to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import numpy as np
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc
from quartet.weights.fetch import fetch_version
from quartet.weights.fetched import Fetched
from quartet.weights.service import WeightServicer
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor

#: What a fault does to the frames of one stream.
Fault = Callable[[Iterator[pb.FetchResponse]], Iterator[pb.FetchResponse]]


class FaultyWeights(WeightServicer):
    """The real servicer; stream i passes through faults[i], later ones are clean. Records offsets."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store)
        self.faults: list[Fault] = []
        self.offsets: list[int] = []
        self.frozen_after: int | None = None
        self.frozen, self.ended = asyncio.Event(), asyncio.Event()

    async def Fetch(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FetchResponse]:
        self.offsets.append(request.offset)
        frames = [frame async for frame in super().Fetch(request, context)]
        fault: Fault = self.faults.pop(0) if self.faults else iter
        for index, frame in enumerate(fault(iter(frames))):
            if index == self.frozen_after:
                await self._freeze()
            yield frame

    async def _freeze(self) -> None:
        self.frozen_after = None
        self.frozen.set()
        try:
            await asyncio.sleep(60)
        finally:
            self.ended.set()


def model(seed: int = 0) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    shapes = {
        "embed": (700, 512),
        "layer.0": (512, 512),
        "layer.1": (512, 512),
        "norm": (512,),
        "odd": (3, 7),
    }
    return {name: Tensor("F32", shape, rng.random(shape, np.float32).data) for name, shape in shapes.items()}


def stub(channel: grpc.aio.Channel) -> Any:
    return rpc.WeightServiceStub(channel)  # type: ignore[no-untyped-call]


class Plane:
    """A publisher and a channel to it."""

    def __init__(self, store: WeightStore, servicer: FaultyWeights, channel: grpc.aio.Channel) -> None:
        self.store, self.servicer, self.channel = store, servicer, channel

    async def fetch(self, run_id: str = "r", version: int | None = 1) -> Fetched:
        return await fetch_version(self.channel, run_id, version)
