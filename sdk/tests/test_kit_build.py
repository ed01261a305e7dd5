"""Which code a process runs (quartet.kit.build, invariants 1 to 3)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import prometheus_client
import pytest
import quartet
from quartet.kit import build
from quartet.kit.build import UNKNOWN, Answer, Build, ask, build_of
from quartet.kit.channel import connect
from quartet.kit.health import Health, HealthServicer
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import weights_pb2_grpc as rpc
from quartet.weights.service import SERVICE, WeightServicer
from quartet.weights.store import WeightStore


def test_equal_files_are_an_equal_build_wherever_they_are(tmp_path: Path) -> None:
    here = Path(quartet.__file__).parent
    copy = tmp_path / "elsewhere"
    shutil.copytree(here, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "notes.txt").write_text("no code")
    (copy / ".#edited.py").symlink_to("user@host.4711")  # the lock of an editor
    assert build._digest(here) == build._digest(copy) == build_of().sdk
    (copy / "inference.py").write_text((copy / "inference.py").read_text() + "\n")
    changed = build._digest(copy)
    (copy / "inference.py").rename(copy / "renamed.py")
    assert len({build._digest(here), changed, build._digest(copy)}) == 3


async def test_a_service_tells_its_build_by_its_health_and_to_prometheus() -> None:
    health = Health()
    offered = Service(SERVICE, rpc.add_WeightServiceServicer_to_server, WeightServicer(WeightStore(keep=1)))
    running = await start([offered], ServerConfig(), health)
    async with connect(running.address) as channel:
        assert await ask(channel, 5) == Answer(build_of(), ready=False)
        health.set_ready(SERVICE)
        assert await ask(channel, 5) == Answer(build_of(), ready=True)
        await running.stop(0)
        silent = await ask(channel, 5)
    assert silent.build == UNKNOWN and silent.error and not silent.ready
    told = prometheus_client.generate_latest().decode()
    of_service = [one for one in told.splitlines() if f'service="{SERVICE}"' in one and "build_info{" in one]
    assert f'sdk="{build_of().sdk}"' in of_service[0] and of_service[0].endswith(" 1.0")


async def test_a_peer_that_does_not_tell_is_unknown() -> None:
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    servicer = health.aio.HealthServicer()
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        assert await ask(channel, 5) == Answer(ready=True)
    await server.stop(None)


@pytest.mark.parametrize(
    ("text", "build_told"),
    [
        ("0.1.0", UNKNOWN),
        ("0.1.0 a", Build("0.1.0", "a")),
        ("0.1.0 a b", Build("0.1.0", "a", "b")),
        ("0.9.0 a b more", UNKNOWN),
    ],
)
async def test_of_a_peer_that_tells_it_otherwise_the_build_is_unknown(text: str, build_told: Build) -> None:
    """Of a later release it may."""
    from grpc_health.v1 import health_pb2_grpc

    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(Health(), Build(text, "")), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        assert await ask(channel, 5) == Answer(build_told, ready=True)
    await server.stop(None)


def test_a_build_of_a_service_has_both_digests() -> None:
    both = Build("0.1.0", "a", "b")
    assert both.text == "0.1.0 a b" and str(both) == "0.1.0 (sdk a, own b)"
    assert build_of("no_such_package").own == "" and build_of("no_such_package").sdk == build_of().sdk


def test_the_command_says_its_version() -> None:
    command = [sys.executable, "-m", "quartet.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"quartet {build_of()}, Python 3.")
