"""A server from bind to exit (quartet.kit.server, invariants 1 to 3), partly in processes of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from loopback import LOOPBACK
from quartet.config import ConfigError, validate
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import BindError, ServerConfig, Service, check_here, serve, start
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc

NAME = "quartet.v1.WeightService"
SERVICE = Service(NAME, rpc.add_WeightServiceServicer_to_server, rpc.WeightServiceServicer())

PROGRAM = textwrap.dedent(
    """
    import asyncio, sys
    from quartet.config import Config, main
    from quartet.kit import logs
    from quartet.kit.health import Health
    from quartet.kit.server import ServerConfig, Service, serve
    from quartet.v1 import weights_pb2 as pb, weights_pb2_grpc as rpc

    class Settings(Config):
        server: ServerConfig = ServerConfig()
        flush_s: float = 0.0

    class Slow(rpc.WeightServiceServicer):
        async def GetManifest(self, request, context):
            print("working", flush=True)
            await asyncio.sleep(float(request.run_id))
            return pb.GetManifestResponse()

    def run(settings):
        logs.configure("test")
        health = Health()

        async def flush():
            print("draining" if health.draining.is_set() else "not draining", flush=True)
            await asyncio.sleep(settings.flush_s)

        name = "quartet.v1.WeightService"
        health.set_ready(name)
        service = Service(name, rpc.add_WeightServiceServicer_to_server, Slow())
        asyncio.run(serve([service], settings.server, health, on_drain=flush))
        print("done", flush=True)

    sys.exit(main(Settings, run))
    """
)


class Child:
    """The program above, in a process of its own."""

    def __init__(self, directory: Path, *argv: str) -> None:
        self.port_file = directory / "port"
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--server.port-file", str(self.port_file), *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def address(self) -> str:
        give_up = time.monotonic() + 60
        while not self.port_file.exists():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < give_up
            time.sleep(0.02)
        return self.port_file.read_text().strip()

    def end(self) -> tuple[int, list[str], str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out.splitlines(), err


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        if child.process.poll() is None:
            child.process.kill()
            child.process.communicate()


async def test_sigterm_drains_in_order_and_exits_zero(tmp_path: Path, children: list[Child]) -> None:
    child = Child(tmp_path)
    children.append(child)
    async with connect(child.address()) as channel:
        stub = rpc.WeightServiceStub(channel)
        call = stub.GetManifest(pb.GetManifestRequest(run_id="1.0"), timeout=60)
        call_task = asyncio.ensure_future(call)
        assert child.process.stdout is not None
        assert await asyncio.to_thread(child.process.stdout.readline) == "working\n"
        child.process.send_signal(signal.SIGTERM)
        assert await call_task == pb.GetManifestResponse(), "work in flight is finished"
    code, out, err = await asyncio.to_thread(child.end)
    assert (code, out) == (0, ["draining", "done"]), err
    assert "Traceback" not in err


@pytest.mark.parametrize("slow", ["--server.drain-seconds=60", "--flush-s=60"])
async def test_grace_ends_and_a_second_signal_ends_it_sooner(
    tmp_path: Path, children: list[Child], slow: str
) -> None:
    child = Child(tmp_path, slow, "--server.flush-seconds=60")
    children.append(child)
    async with connect(child.address()) as channel:
        stub = rpc.WeightServiceStub(channel)
        call_task = asyncio.ensure_future(stub.GetManifest(pb.GetManifestRequest(run_id="30"), timeout=60))
        assert child.process.stdout is not None
        await asyncio.to_thread(child.process.stdout.readline)
        child.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(child.process.stdout.readline) == "draining\n"
        began = time.monotonic()
        child.process.send_signal(signal.SIGINT)
        with pytest.raises(grpc.aio.AioRpcError):
            await call_task
    code, out, err = await asyncio.to_thread(child.end)
    assert (code, out) == (0, ["done"]), err
    assert time.monotonic() - began < 25  # of the 30 s that the call would take, and the minute of the other


def test_a_port_in_use_is_one_sentence_and_exit_2(tmp_path: Path, children: list[Child]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        child = Child(tmp_path, f"--server.address=127.0.0.1:{taken.getsockname()[1]}")
        children.append(child)
        code, _out, err = child.end()
    assert code == 2
    said = [line for line in err.splitlines() if not line.startswith("{")]  # besides the JSON log
    assert len(said) == 1 and said[0].startswith("error: server.address") and "the port is in use" in said[0]


async def test_two_servers_never_share_a_port() -> None:
    running = await start([SERVICE], ServerConfig(address=f"{LOOPBACK}:0"), Health())
    try:
        with pytest.raises(BindError, match="the port is in use"):
            await start([SERVICE], ServerConfig(address=running.address), Health())
    finally:
        await running.stop(0)
    again = await start([SERVICE], ServerConfig(address=running.address), Health())
    await again.stop(0)


@pytest.mark.parametrize("address", ["localhost", "a:b:c", ":1", "h:123456", "unix:", ""])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^address = .* is refused: should be host:port, such as"):
        validate(ServerConfig, {"address": address})


@pytest.mark.parametrize("address", ["http://127.0.0.1:50051", "https://0.0.0.0:1"])
def test_a_url_is_told_to_be_one(address: str) -> None:
    with pytest.raises(ConfigError, match=r"address = .* is refused: is a URL, and should be host:port"):
        validate(ServerConfig, {"address": address})


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("no-such-host.invalid:0", "no address of this machine"),
        ("inference..svc:0", "no address of this machine"),
        ("127.0.0.1:99999", "cannot be bound|no address"),
        ("192.0.2.1:0", "cannot be bound"),
        ("unix:/none/s", "'unix:/none/s' cannot be bound: there is no folder /none; make it"),
        ("unix:///none/s", "there is no folder /none; make it"),
        (f"unix:/tmp/{'ö' * 52}", "a socket's path ends at 107 bytes; name a shorter one"),
    ],
)
async def test_addresses_that_cannot_be_bound(address: str, says: str) -> None:
    config = ServerConfig(address=address, insecure_ok_off_loopback=True)
    with pytest.raises(ConfigError, match=says):
        await start([SERVICE], config, Health())
    with pytest.raises(ConfigError, match=says):
        check_here(config)


async def test_port_file_is_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    running = await start([SERVICE], ServerConfig(port_file=tmp_path / "port"), Health())
    await running.stop(0)
    assert (tmp_path / "port").read_text() == f"{running.address}\n"
    assert os.listdir(tmp_path) == ["port"]


async def test_a_port_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="port_file"):
        await start([SERVICE], ServerConfig(port_file=tmp_path / "none" / "port"), Health())


async def test_unix_sockets(tmp_path: Path) -> None:
    folder = tmp_path / "Jürgen"
    folder.mkdir()
    config = ServerConfig(address=f"unix:{folder}/s", port_file=folder / "port")
    running = await start([SERVICE], config, Health())
    assert (folder / "port").read_text(encoding="utf-8") == f"{running.address}\n"
    async with connect(running.address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
    await running.stop(0)


async def test_a_socket_is_taken_from_nobody_who_listens_there(tmp_path: Path) -> None:
    config = ServerConfig(address=f"unix:{tmp_path}/s")
    running = await start([SERVICE], config, Health())
    for attempt in (check_here, lambda config: asyncio.run(start([SERVICE], config, Health()))):
        with pytest.raises(BindError, match="/s' cannot be bound: a process listens there; stop it, or name"):
            await asyncio.to_thread(attempt, config)
    async with connect(running.address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
    await running.stop(0)
    # Of a process that was killed, a socket is left that nobody listens at.
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{tmp_path}/s")
    again = await start([SERVICE], config, Health())
    await again.stop(0)
    (tmp_path / "s").write_text("somebody's own")
    with pytest.raises(BindError, match="what stands there is no socket; remove it, or name another path"):
        check_here(config)


async def test_reflection_lists_the_services_and_can_be_off() -> None:
    async def listed(enabled: bool) -> set[str]:
        running = await start([SERVICE], ServerConfig(reflection=enabled), Health())
        try:
            async with connect(running.address) as channel:
                stub = reflection_pb2_grpc.ServerReflectionStub(channel)
                call = stub.ServerReflectionInfo(
                    iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5
                )
                answer = await call.read()
            return {service.name for service in answer.list_services_response.service}
        finally:
            await running.stop(0)

    assert {NAME, "grpc.health.v1.Health"} <= await listed(True)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await listed(False)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_metrics_are_served_and_the_port_is_given_back() -> None:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        address = f"{LOOPBACK}:{free.getsockname()[1]}"
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    for _ in range(2):
        running = await start([SERVICE], ServerConfig(metrics_address=address), Health())
        try:
            page = await asyncio.to_thread(lambda: ask(f"http://{address}/metrics").read())
            with pytest.raises(ConfigError, match="metrics_address"):
                await start([SERVICE], ServerConfig(metrics_address=address), Health())
        finally:
            await running.stop(0)
        assert b"quartet_rpc_handled_total" in page


async def test_a_cancelled_serve_leaves_nothing_behind() -> None:
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        address = f"{LOOPBACK}:{free.getsockname()[1]}"
    task = asyncio.create_task(serve([SERVICE], ServerConfig(address=address), Health(), started=started))
    assert await asyncio.wait_for(started, 30) == address
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    again = await start([SERVICE], ServerConfig(address=address), Health())
    await again.stop(0)


async def test_a_serve_that_is_cancelled_while_it_drains_ends_what_it_flushes() -> None:
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    flushing, ended = asyncio.Event(), asyncio.Event()

    async def flush() -> None:
        flushing.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    before = asyncio.all_tasks()
    task = asyncio.create_task(serve([SERVICE], ServerConfig(), Health(), on_drain=flush, started=started))
    await asyncio.wait_for(started, 30)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(flushing.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    left = {one.get_coro().__qualname__ for one in asyncio.all_tasks() - before}
    assert not left & {"Event.wait", "_flush"}


async def test_who_only_watches_health_is_not_waited_for() -> None:
    health = Health()
    health.set_ready(NAME)
    running = await start([SERVICE], ServerConfig(), health)
    async with connect(running.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        health.drain()
        await asyncio.wait_for(running.stop(600), 30)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


def test_the_kit_imports_no_torch() -> None:
    modules = "quartet.kit.server, quartet.kit.channel, quartet.kit.call, quartet.kit.stream, quartet.config"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_service_runs_with_the_hard_limit_of_open_files() -> None:
    """And what it starts inherits that."""
    code = (
        "import resource as r; from quartet.config import Config, main\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, 128))\n"
        "def run(config):\n"
        "    files = [open('/dev/null') for _ in range(100)]\n"
        "    print(r.getrlimit(r.RLIMIT_NOFILE))\n"
        "main(Config, run, [])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout == "(128, 128)\n", done.stderr


async def test_a_burst_while_the_loop_is_busy_is_answered_whole() -> None:
    """Every call of a burst has its answer: gRPC's core resets none of them."""

    class Quick(rpc.WeightServiceServicer):
        async def GetManifest(
            self, request: pb.GetManifestRequest, context: object
        ) -> pb.GetManifestResponse:
            return pb.GetManifestResponse()

    service = Service(NAME, rpc.add_WeightServiceServicer_to_server, Quick())
    running = await start([service], ServerConfig(), Health())
    calls = 3000  # gRPC's own limits are 1000, from which it drops at random, and 3000

    with grpc.insecure_channel(running.address) as channel:
        stub = rpc.WeightServiceStub(channel)  # type: ignore[no-untyped-call]
        grpc.channel_ready_future(channel).result(60)
        answers = [stub.GetManifest.future(pb.GetManifestRequest(), timeout=60) for _ in range(calls)]
        time.sleep(1.0)  # noqa: ASYNC251 - the busy loop
        codes = await asyncio.to_thread(lambda: {answer.code() for answer in answers})
    await running.stop()
    assert codes == {grpc.StatusCode.OK}
