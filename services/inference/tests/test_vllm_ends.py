"""A vLLM core that is killed takes its replica along: health says so, then the process ends with an error.
One that hangs fails the liveness check, and ends in the same way. Whoever waits for it is answered.

Whoever waits for a change of weights, too: test_vllm_engine.py and test_vllm_workers.py."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quartet.errors import QuartetError
from quartet.inference import INFERENCE
from quartet.kit.channel import connect
from quartet.kit.health import LIVENESS, Health
from quartet.v1 import inference_service_pb2 as pb
from quartet_inference.vllm import environment

from .inference_replica import Replica
from .test_engine_ends import LONG

pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")

START_SECONDS = 120  # importing torch and vLLM on a loaded machine


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    found = [int(one) for file in children for one in file.read_text().split()]
    return [*found, *(one for child in found for one in descendants(child))]


@asynccontextmanager
async def serving(model: Path, folder: Path, *more: str) -> AsyncIterator[tuple[Process, str, list[int]]]:
    """A service of its own: the process, its address, its cores. Its log is `folder`/log."""
    port_file, log = folder / "port", folder / "log"
    arguments = [
        "--model", str(model), "--engine", "vllm", "--max-model-len", "256",
        "--vllm.kv-cache-bytes", str(1 << 25), "--server.port-file", str(port_file), *more,
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
        cores = [one for one in descendants(service.pid) if "EngineCore" in _name(one)]
        assert cores
        yield service, port_file.read_text().strip(), cores
    finally:
        if service.returncode is None:
            service.kill()
            await service.wait()


def assert_core_is_a_fork(service: int, cores: list[int]) -> None:
    """Of a server that was there before any thread of the service, of which imports and gRPC start many."""
    [server] = {int(_stat(f"/proc/{core}")[1]) for core in cores}
    assert server in descendants(service) and "imports of vLLM's cores" in _name(server)
    threads = [one for one in Path(f"/proc/{service}/task").iterdir() if one.name != str(service)]
    assert threads and all(_started(f"/proc/{server}") < _started(str(one)) for one in threads)


async def is_told_and_ends_when_killed(
    service: Process, channel: grpc.aio.Channel, cores: list[int], at_work: bool
) -> None:
    """Of the cores of a service."""
    replica = Replica(channel, Health())
    watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
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
        assert await service.wait() == 1


async def test_a_killed_vllm_core_is_told_and_ends_the_process(
    conformance_folder: Path, tmp_path: Path
) -> None:
    """One that has nothing to do. And forks.py 1: its server imported while the service did."""
    log = tmp_path / "log"
    async with (
        serving(conformance_folder, tmp_path) as (service, address, cores),
        connect(address) as channel,
    ):
        if environment.is_cpu_build():
            assert_core_is_a_fork(service.pid, cores)
        await is_told_and_ends_when_killed(service, channel, cores, at_work=False)
    assert "EngineEnded: vLLM's core has ended" in log.read_text()


async def test_a_core_that_hangs_before_a_first_token_fails_liveness_and_goes_on_until_it_is_killed(
    conformance_folder: Path, tmp_path: Path
) -> None:
    """app.py: whoever waits is at the core, too. And a Ctrl-C is for the service alone."""
    log = tmp_path / "log"
    async with (
        serving(conformance_folder, tmp_path, "--stall-seconds", "5") as (service, address, cores),
        connect(address) as channel,
    ):
        assert os.getpgid(service.pid) not in map(os.getpgid, cores)
        replica = Replica(channel, Health())
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=LIVENESS)
        )
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        for core in cores:
            os.kill(core, signal.SIGSTOP)
        call = asyncio.create_task(replica.generate(LONG, 60))
        async with asyncio.timeout(60):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            for core in cores:
                os.kill(core, signal.SIGCONT)
            await call
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await is_told_and_ends_when_killed(service, channel, cores, at_work=True)
    assert "EngineEnded: vLLM's core has ended" in log.read_text()


@pytest.mark.parametrize("generates", [True, False])
async def test_a_core_that_hangs_for_good_ends_the_process_and_is_killed(
    generates: bool, conformance_folder: Path, tmp_path: Path
) -> None:
    """ending.py 3; also where no request is there, as while all wait for the version that it takes."""
    log = tmp_path / "log"
    async with (
        serving(conformance_folder, tmp_path, "--stall-seconds", "1") as (service, address, cores),
        connect(address) as channel,
    ):
        replica = Replica(channel, Health())
        for core in cores:
            os.kill(core, signal.SIGSTOP)
        pausing = replica.stub.Pause
        asked = replica.generate(LONG, 60) if generates else pausing(pb.PauseRequest(), timeout=60)
        async with asyncio.timeout(60):
            with pytest.raises((QuartetError, grpc.aio.AioRpcError)) as failed:
                await asked
            if generates:
                assert failed.match("NOT_READY")
            assert await service.wait() == 1, log.read_text()
    assert "EngineEnded: the engine hangs: no progress for" in log.read_text()
    assert not [core for core in cores if _is_there(core)]


def _stat(process: str) -> list[str]:
    """Behind its name; see proc(5), whose third field is the first here."""
    return Path(f"{process}/stat").read_text().rpartition(")")[2].split()


def _started(process: str) -> int:
    """In ticks since the machine has booted."""
    return int(_stat(process)[19])


def _is_there(pid: int) -> bool:
    """Not where it has ended, whoever has still to hear of it."""
    try:
        return _stat(f"/proc/{pid}")[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
