"""A vLLM core that is killed takes its replica along: health says so, then the process ends with an error."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quartet.errors import QuartetError
from quartet.inference import INFERENCE
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.v1 import inference_service_pb2 as pb

from .inference_replica import Replica
from .test_engine_ends import LONG

pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")

START_SECONDS = 120  # importing torch and vLLM on a loaded machine


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(one) for file in children for one in file.read_text().split()]
    return [*found, *(one for child in found for one in descendants(child))]


@pytest.mark.parametrize("at_work", [True, False])
async def test_a_killed_vllm_core_is_told_and_ends_the_process(
    conformance_folder: Path, tmp_path: Path, at_work: bool
) -> None:
    port_file, log = tmp_path / "port", tmp_path / "log"
    arguments = [
        "--model", str(conformance_folder), "--engine", "vllm", "--max-model-len", "256",
        "--vllm.kv-cache-bytes", str(1 << 25), "--server.port-file", str(port_file),
    ]  # fmt: skip
    with log.open("wb") as file:
        service = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quartet_inference", *arguments, stdout=file, stderr=file
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not port_file.exists():
            assert service.returncode is None and time.monotonic() < deadline, log.read_text()
            await asyncio.sleep(0.1)
        async with connect(port_file.read_text().strip()) as channel:
            replica = Replica(channel, Health())
            watch: Any = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=INFERENCE)
            )
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            cores = [one for one in descendants(service.pid) if "EngineCore" in _name(one)]
            assert cores
            calls = await replica.midway(lambda: [replica.generate(LONG, 60)]) if at_work else []
            if at_work:
                await replica.stub.Resume(pb.ResumeRequest())
            for core in cores:
                os.kill(core, signal.SIGKILL)
            async with asyncio.timeout(60):
                for call in calls:
                    with pytest.raises(QuartetError, match="NOT_READY"):
                        await call
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
                assert await service.wait() == 1, log.read_text()
        assert "EngineEnded: vLLM's core has ended" in log.read_text()
    finally:
        if service.returncode is None:
            service.kill()
            await service.wait()


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
