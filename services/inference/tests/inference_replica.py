"""A service with the embedded engine over loopback gRPC, a client of it, and a trainer's weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from loopback import LOOPBACK
from quartet.errors import QuartetError, from_rpc
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import inference_service_pb2_grpc as rpc
from quartet.v1 import weights_pb2_grpc
from quartet.weights.service import WeightServicer
from quartet.weights.store import WeightStore
from quartet_inference import answering, app
from quartet_inference.config import InferenceConfig

Make = Callable[..., Any]


async def publish(store: WeightStore, address: str = f"{LOOPBACK}:0") -> RunningServer:
    """A trainer as far as inference can see."""
    add = weights_pb2_grpc.add_WeightServiceServicer_to_server
    service = Service("quartet.v1.WeightService", add, WeightServicer(store))
    return await start([service], ServerConfig(address=address), Health())


class Replica:
    """A running service and a client of it."""

    def __init__(self, channel: grpc.aio.Channel, health: Health) -> None:
        self.channel = channel
        self.stub: Any = rpc.InferenceServiceStub(channel)
        self.health = health
        self.start = pb.GenerateStart()  # of the call that began last

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float = 20
    ) -> tuple[list[Any], list[Any]]:
        """Deltas and finishes; RPC errors typed."""
        deltas, finishes, starts = [], [], 0
        try:
            async for response in self.stub.Generate(request, timeout=timeout_s):
                if response.HasField("start"):
                    assert starts == 0 and not deltas, "once, no later than the first delta"
                    starts, self.start = 1, response.start
                if response.HasField("delta"):
                    deltas.append(response.delta)
                if response.HasField("finish"):
                    finishes.append(response.finish)
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        return deltas, finishes

    async def refusal(self, request: pb.GenerateRequest, timeout_s: float = 20) -> QuartetError:
        with pytest.raises(QuartetError) as caught:
            await self.generate(request, timeout_s)
        return caught.value

    async def refused_in_the_end(self, request: pb.GenerateRequest) -> QuartetError:
        """Of what waits until the caller's deadline: told long before it, so that no slow machine is late."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(answering, "DEADLINE_MARGIN_SECONDS", 29.0)
            return await self.refusal(request, timeout_s=30)

    async def model(self) -> Any:
        return await self.stub.GetModel(pb.GetModelRequest(), timeout=30)

    async def until(self, true: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(60):
            while not true(model := await self.model()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return model

    async def midway(self, begin: Callable[[], list[Any]], tokens: int = 20) -> list[asyncio.Task[Any]]:
        """Calls for a completion each, of which none has ended: decoding waits for nobody, and is paused."""
        for _ in range(10):
            to = (await self.model()).tokens_sampled + tokens
            calls = [asyncio.create_task(call) for call in begin()]

            def under_way(model: Any, calls: list[asyncio.Task[Any]] = calls) -> bool:
                return bool(model.running + model.waiting == len(calls))

            await self.until(
                lambda model, to=to, calls=calls, under_way=under_way: (
                    (model.tokens_sampled >= to and under_way(model)) or any(call.done() for call in calls)
                )
            )
            await self.stub.Pause(pb.PauseRequest())
            if under_way(await self.model()):
                return calls
            await self.stub.Resume(pb.ResumeRequest())
            await asyncio.gather(*calls)
        raise AssertionError("they always ended before it was paused")

    async def until_version(self, run_id: str, version: int) -> Any:
        def arrived(model: Any) -> bool:
            return model.HasField("policy_version") and (model.run_id, model.policy_version) == (
                run_id,
                version,
            )

        return await self.until(arrived)


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Replica]:
    settings = {"max_model_len": 256, "embedded": {"kv_cache_bytes": 1 << 24, "max_num_seqs": 8}, **settings}
    config = InferenceConfig(model=folder, **settings)
    health = Health()
    async with app.services(config, health) as services:
        server = await start(services, config.server, health)
        async with connect(server.address) as channel:
            yield Replica(channel, health)
        await server.stop(0)
