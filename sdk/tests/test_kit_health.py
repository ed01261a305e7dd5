"""Health means progress, not that a port answers (quartet.kit.health, invariants 1 to 5)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quartet.errors import from_rpc
from quartet.kit import health as health_module
from quartet.kit import probe
from quartet.kit.build import UNKNOWN
from quartet.kit.channel import connect
from quartet.kit.health import LIVENESS, Health, HealthServicer
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.v1 import weights_pb2_grpc as rpc

NAME = "quartet.v1.WeightService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def _watched(health: Health) -> AsyncIterator[None]:
    task = asyncio.create_task(health.watchdog())
    await asyncio.sleep(0)  # it looks at the clock for the first time
    try:
        yield
    finally:
        task.cancel()


@contextlib.asynccontextmanager
async def _served(health: Health) -> AsyncIterator[RunningServer]:
    add = rpc.add_WeightServiceServicer_to_server
    running = await start([Service(NAME, add, rpc.WeightServiceServicer())], ServerConfig(), health)
    try:
        yield running
    finally:
        await running.stop(0)


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0
        self._moved = asyncio.Event()

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            await self._moved.wait()

    async def jump(self, seconds: float) -> None:
        """The loop is held up for so long."""
        self.now += seconds
        self._moved.set()
        self._moved = asyncio.Event()
        for _ in range(5):  # whoever slept looks at the clock, and sleeps again
            await asyncio.sleep(0)

    async def passes(self, seconds: float) -> None:
        """The loop runs for so long."""
        for _ in range(round(seconds / 0.01)):
            await self.jump(0.01)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(health_module, "time", clock)
    monkeypatch.setattr(health_module, "asyncio", SimpleNamespace(sleep=clock.sleep, Event=asyncio.Event))
    return clock


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "WATCHDOG_SECONDS", 0.02)


def test_ready_is_all_services() -> None:
    health = Health()
    health.register(["a", "b"])
    health.set_ready("a")
    assert (health.why_not("a"), health.why_not("b"), health.why_not()) == ("", "starting", "b: starting")
    health.set_ready("b")
    assert health.why_not() == ""
    health.set_not_ready("a", "loading weights")
    assert health.why_not() == "a: loading weights"
    with pytest.raises(KeyError):
        health.why_not("c")


def test_what_was_ready_before_registration_stays_ready() -> None:
    health = Health()
    health.set_ready("a")
    health.register(["a"])
    assert health.why_not("a") == ""


def test_draining_is_not_ready_but_alive() -> None:
    health = Health()
    health.set_ready("a")
    health.drain()
    assert (health.why_not("a"), health.why_not(), health.why_not(LIVENESS)) == ("draining", "draining", "")


async def test_no_progress_while_busy_fails_liveness_only(clock: Clock) -> None:
    health = Health()
    health.set_ready("a")
    busy = [False]
    health.watch_progress(0.1, lambda: busy[0])
    async with _watched(health):
        await clock.passes(0.25)
        assert health.why_not(LIVENESS) == "", "idle time is not lack of progress"
        busy[0] = True
        await clock.passes(0.05)
        assert health.why_not(LIVENESS) == "", "the clock starts when the work does"
        await clock.passes(0.15)
        assert "no progress" in health.why_not(LIVENESS) and health.why_not() == ""
        health.progress()
        assert health.why_not(LIVENESS) == ""


async def test_a_limit_may_follow_what_is_under_way(clock: Clock) -> None:
    health = Health()
    limits = [1.0]
    health.watch_progress(lambda: limits[0], lambda: True)
    async with _watched(health):
        await clock.passes(0.25)
        assert health.why_not(LIVENESS) == ""
        limits[0] = 0.2
        assert "limit 0.2 s" in health.why_not(LIVENESS)


async def test_progress_keeps_a_long_job_alive(clock: Clock) -> None:
    health = Health()
    health.watch_progress(0.2, lambda: True)
    async with _watched(health):
        for _ in range(10):
            await clock.passes(0.04)
            await asyncio.to_thread(health.progress)
            assert health.why_not(LIVENESS) == ""


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_late_loop_fails_liveness_until_it_recovers(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    monkeypatch.setattr(health_module, "LOOP_LAG_LIMIT_SECONDS", 0.1)
    monkeypatch.setattr(health_module, "WATCHDOG_SECONDS", 0.1)
    health = Health(is_told=is_told)
    async with _watched(health):
        await clock.passes(0.01)
        assert health.why_not(LIVENESS) == ""
        with structlog.testing.capture_logs() as logged:
            await clock.jump(0.3)
        told = [one["alive"] for one in logged if one["event"] == "liveness changed"]
        assert told == ([False] if is_told else [])
        assert "late" in health.why_not(LIVENESS)
        await clock.passes(0.15)
        assert health.why_not(LIVENESS) == ""


async def test_check_and_watch_over_the_wire() -> None:
    health = Health()
    async with _served(health) as running, connect(running.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def check(key: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=key), timeout=20)).status)

        assert [await check(key) for key in ("", NAME, LIVENESS)] == [NOT_SERVING, NOT_SERVING, SERVING]
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await watch.read()).status == NOT_SERVING
        health.set_ready(NAME)
        assert (await watch.read()).status == SERVING
        assert await check("") == SERVING
        listed = await stub.List(health_pb2.HealthListRequest(), timeout=20)
        assert {key: one.status for key, one in listed.statuses.items()} == {
            "": SERVING, LIVENESS: SERVING, NAME: SERVING,
        }  # fmt: skip
        watch.cancel()


async def test_probe(capsys: pytest.CaptureFixture[str]) -> None:
    health = Health()
    async with _served(health) as running:

        async def run(*argv: str) -> int:
            return await asyncio.to_thread(probe.main, ["--address", running.address, *argv])

        assert await run() == 1
        assert await run("--service", LIVENESS) == 0
        assert await run("--service", "no.such.Service") == 1
        health.set_ready(NAME)
        assert await run() == 0 and await run("--service", NAME) == 0
    assert await run("--timeout", "0.5") == 1
    assert await run("--cert-file", "c.pem") == 1
    said = capsys.readouterr()
    told = [line for line in said.out.splitlines() if line.endswith("SERVING")]
    assert told == ["NOT_SERVING", "SERVING", "SERVING", "SERVING"]
    assert said.err.startswith("error: cert_file and key_file go together") and said.err.count("\n") == 1


async def test_no_more_watch_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """health.py 5."""
    monkeypatch.setattr(health_module, "MAX_WATCHERS", 2)
    async with _served(Health()) as running, connect(running.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=LIVENESS)
        held = [stub.Watch(request) for _ in range(2)]
        assert [(await one.read()).status for one in held] == [SERVING, SERVING]
        with pytest.raises(grpc.RpcError) as refused:
            await stub.Watch(request).read()
        assert from_rpc(refused.value).reason == "OVERLOADED"
        assert (await stub.Check(request)).status == SERVING
        for one in held:
            one.cancel()
        async with asyncio.timeout(30):
            while True:
                try:
                    answer = await stub.Watch(request).read()
                    break
                except grpc.RpcError as still:
                    assert from_rpc(still).reason == "OVERLOADED"
                    await asyncio.sleep(health_module.WATCHDOG_SECONDS)
        assert answer.status == SERVING, "who left made room"


async def test_who_watches_is_told_of_what_changed_while_the_last_word_was_sent() -> None:
    health = Health()
    health.set_ready(NAME)
    servicer = HealthServicer(health, UNKNOWN)
    watch = servicer.Watch(health_pb2.HealthCheckRequest(service=NAME), None)
    assert (await anext(watch)).status == health_pb2.HealthCheckResponse.SERVING
    health.drain()
    servicer.close()
    assert [told.status async for told in watch] == [health_pb2.HealthCheckResponse.NOT_SERVING]
