"""An engine that ends by itself takes its replica along: health says so, then the service ends, an error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quartet.inference import INFERENCE
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet_inference import app, ending
from quartet_inference.config import InferenceConfig
from quartet_inference.embedded import engine as embedded
from quartet_inference.embedded.decoder import Decoder
from quartet_inference.embedded.score import Scorer
from quartet_inference.ending import EngineEnded

from .inference_replica import Replica, serving

LONG = pb.GenerateRequest(
    tokens=pb.TokensPrompt(token_ids=[1, 2]),
    sampling=common_pb2.SamplingParams(max_tokens=200, ignore_eos=True),
)
SCORED = pb.ScoreRequest(samples=[{"token_ids": [1, 2], "spans": [{"start": 1, "length": 1}]}])  # type: ignore[list-item]


def thread_dies(_: Decoder) -> None:
    raise MemoryError("of the test")


async def test_the_death_of_the_decoding_thread_is_told_and_ends_the_service(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = InferenceConfig(model=model_folder, max_model_len=256, server={"port_file": tmp_path / "port"})  # type: ignore[arg-type]
    service = asyncio.create_task(app.run(config))
    async with asyncio.timeout(60):
        while not (tmp_path / "port").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    async with connect((tmp_path / "port").read_text().strip()) as channel:
        replica = Replica(channel, Health())
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        monkeypatch.setattr(Decoder, "_cycle", thread_dies)
        assert (await replica.refusal(LONG)).reason == "NOT_READY"
        async with asyncio.timeout(60):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(ExceptionGroup) as ended:
                await service
    assert ended.group_contains(EngineEnded, match="decoding thread died: MemoryError")


@pytest.mark.parametrize("hanging", ["a step", "a command", "a score"])
async def test_a_decoding_thread_that_hangs_ends_the_service(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hanging: str
) -> None:
    """ending.py 3: heartbeats go on, so that nobody who waits there would leave; nor need anybody wait."""
    monkeypatch.setattr(ending, "SAYING_SECONDS", 0.0)
    monkeypatch.setattr(embedded, "CLOSE_SECONDS", 0.1)
    config = InferenceConfig(
        model=model_folder,
        stall_seconds=1,
        server={"port_file": tmp_path / "port"},  # type: ignore[arg-type]
    )
    service = asyncio.create_task(app.run(config))
    async with asyncio.timeout(60):
        while not (tmp_path / "port").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    released = threading.Event()
    async with connect((tmp_path / "port").read_text().strip()) as channel:
        replica = Replica(channel, Health())
        calls: dict[str, tuple[type, str, Callable[[], Awaitable[Any]]]] = {
            "a step": (Decoder, "_cycle", lambda: replica.refusal(LONG)),
            "a command": (Decoder, "set_paused", lambda: replica.stub.Pause(pb.PauseRequest())),
            "a score": (Scorer, "piece", lambda: replica.stub.Score(SCORED)),
        }
        owner, method, ask = calls[hanging]
        monkeypatch.setattr(owner, method, lambda *_: released.wait())
        call = asyncio.ensure_future(ask())
        try:
            async with asyncio.timeout(60):
                with pytest.raises(ExceptionGroup) as ended:
                    await service
                (outcome,) = await asyncio.gather(call, return_exceptions=True)
        finally:
            released.set()
    assert ended.group_contains(EngineEnded, match="the engine hangs: no progress for")
    if hanging == "a step":
        assert outcome.reason == "NOT_READY"


async def test_a_replica_that_drains_ends_as_it_was_about_to(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "SAYING_SECONDS", 0.0)
    async with serving(model_folder) as replica:
        replica.health.drain()
        monkeypatch.setattr(Decoder, "_cycle", thread_dies)
        assert (await replica.refusal(LONG)).reason == "NOT_READY"
        await asyncio.sleep(4 * ending.LOOK_SECONDS)
        assert (await replica.model()).engine == "embedded", "it still answers"
