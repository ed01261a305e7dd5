"""Errors, context, limits and heartbeats over real loopback gRPC, with a WeightService as the guinea pig."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import prometheus_client
import pytest
import structlog
from quartet.errors import QuartetError, from_rpc
from quartet.kit import context as request_context
from quartet.kit.call import RetryBudget, stream, unary
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.intercept import ServerInterceptor
from quartet.kit.options import MAX_MESSAGE_BYTES
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.kit.stream import with_heartbeats
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

    async def GetManifest(self, request: Any, context: Any) -> Any:
        self.calls += 1
        self.entered.set()
        self.seen = dict(structlog.contextvars.get_contextvars())
        self.seen["remaining_s"] = request_context.remaining_s()
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
        try:
            yield pb.WatchResponse(announced=pb.VersionAnnounced(version=1))
            if request.run_id == "typed":
                raise QuartetError("RUN_UNKNOWN", "no such run", run_id="typed")
            if request.run_id == "crash":
                raise KeyError("/secret/path")
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def Push(self, requests: Any, context: Any) -> Any:
        sizes = [len(request.chunk.data) async for request in requests]
        self.pushed += sizes
        return pb.PushResponse(version=len(sizes))


@contextlib.asynccontextmanager
async def _served(**config: Any) -> AsyncIterator[tuple[GuineaPig, Any, RunningServer]]:
    pig = GuineaPig()
    service = Service(NAME, rpc.add_WeightServiceServicer_to_server, pig)
    running = await start([service], ServerConfig(**config), Health())
    async with connect(running.address) as channel:
        try:
            yield pig, rpc.WeightServiceStub(channel), running
        finally:
            await running.stop(0)


def _ask(run_id: str = "") -> Any:
    return pb.GetManifestRequest(run_id=run_id)


async def _failure(awaitable: Any) -> QuartetError:
    with pytest.raises(QuartetError) as caught:
        await awaitable
    return caught.value


async def _drained(responses: AsyncIterator[Any]) -> list[Any]:
    return [response async for response in responses]


async def test_a_typed_error_arrives_typed() -> None:
    async with _served() as (_pig, stub, _running):
        error = await _failure(unary(stub.GetManifest, _ask("typed"), timeout_s=5))
        assert (error.reason, error.metadata) == ("RUN_UNKNOWN", {"run_id": "typed"})
        streamed = await _failure(
            _drained(stream(stub.Watch(pb.WatchRequest(run_id="typed")), idle_timeout_s=5))
        )
        assert streamed.reason == "RUN_UNKNOWN"


async def test_a_crash_tells_the_caller_only_its_request_id() -> None:
    async with _served() as (pig, stub, _running):
        error = await _failure(unary(stub.GetManifest, _ask("crash"), timeout_s=5))
        assert error.reason == "INTERNAL" and "secret" not in str(error) + str(error.metadata)
        assert error.metadata == {"request_id": pig.seen["request_id"]}
        responses = stream(stub.Watch(pb.WatchRequest(run_id="crash")), idle_timeout_s=5)
        error = await _failure(_drained(responses))
        assert error.reason == "INTERNAL" and "secret" not in str(error)


def _raw(running: RunningServer) -> Any:
    """A channel without our limits: what a careless or hostile peer has."""
    return grpc.aio.insecure_channel(
        running.address, options=[("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    )


@pytest.mark.parametrize("method", ["GetManifest", "Watch", "Push"])
async def test_malformed_bytes_are_an_invalid_request(method: str) -> None:
    async with _served() as (pig, _stub, running), _raw(running) as channel:
        path = f"/{NAME}/{method}"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if method == "GetManifest":
                await channel.unary_unary(path)(b"\xff\xff", timeout=5)
            elif method == "Watch":
                await channel.unary_stream(path)(b"\xff\xff", timeout=5).read()
            else:
                await channel.stream_unary(path)(iter([b"\xff\xff"]), timeout=5)
        error = from_rpc(caught.value)
        assert (error.reason, error.metadata["field"]) == ("INVALID_REQUEST", "request")
        assert pig.calls == 0 and pig.pushed == []


async def test_an_oversize_request_is_refused_and_changes_nothing() -> None:
    """Invariant 8: messages at 4 MiB."""
    async with _served() as (pig, stub, running):
        large = pb.GetManifestRequest(run_id="x" * (MAX_MESSAGE_BYTES + 1))
        error = await _failure(unary(stub.GetManifest, large, timeout_s=5, budget=RetryBudget()))
        assert error.reason == "INVALID_REQUEST"
        async with _raw(running) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{NAME}/GetManifest")(large.SerializeToString(), timeout=5)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert pig.calls == 0
        assert await unary(stub.GetManifest, _ask(), timeout_s=5) == pb.GetManifestResponse()


async def test_an_oversize_response_is_our_fault_and_says_so() -> None:
    async with _served() as (_pig, stub, _running):
        with structlog.testing.capture_logs() as logs:
            error = await _failure(unary(stub.GetManifest, _ask("huge"), timeout_s=5))
        assert error.reason == "INTERNAL"
        assert "the limit is 4194304" in str(next(one["exc_info"] for one in logs if "exc_info" in one))


async def test_an_unknown_method_has_an_error_info() -> None:
    async with _served() as (_pig, _stub, running), _raw(running) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{NAME}/Nope")(b"", timeout=5)
        error = from_rpc(caught.value)
        assert (error.reason, error.metadata) == ("NOT_IMPLEMENTED", {"rpc": f"/{NAME}/Nope"})


async def test_client_streams_reach_the_handler() -> None:
    async with _served() as (pig, stub, _running):
        frames = [pb.PushRequest(chunk=pb.WeightChunk(data=bytes(size))) for size in (1, 2)]
        assert (await unary(stub.Push, iter(frames), timeout_s=5)).version == 2
        assert pig.pushed == [1, 2]


async def test_retries_stay_within_the_budget() -> None:
    """Invariant 8."""
    quick = RetryBudget(max_attempts=5, initial_backoff_s=0.001, max_backoff_s=0.002)
    async with _served() as (pig, stub, _running):
        await unary(stub.GetManifest, _ask("flaky"), timeout_s=5, budget=quick)
        assert pig.calls == 3
        pig.calls = -10
        assert (
            await _failure(unary(stub.GetManifest, _ask("flaky"), timeout_s=5, budget=quick))
        ).reason == "OVERLOADED"
        assert pig.calls == -5
        await _failure(unary(stub.GetManifest, _ask("typed"), timeout_s=5, budget=quick))
        assert pig.calls == -4, "what repeating cannot mend is not repeated"


async def test_retries_stay_within_the_deadline() -> None:
    budget = RetryBudget(max_attempts=1000, initial_backoff_s=0.05, max_backoff_s=0.1)
    async with connect("127.0.0.1:1") as channel:
        began = time.monotonic()
        error = await _failure(
            unary(rpc.WeightServiceStub(channel).GetManifest, _ask(), timeout_s=0.5, budget=budget)
        )
        assert error.reason in ("NOT_READY", "DEADLINE")
        assert time.monotonic() - began < 1.0


def test_backoff_is_jittered_capped_and_respects_the_peer() -> None:
    budget = RetryBudget(initial_backoff_s=0.1, max_backoff_s=1.0)
    plain = QuartetError("NOT_READY", "later")
    delays = {budget.delay_s(30, plain) for _ in range(50)}
    assert len(delays) > 40 and max(delays) <= 1.0
    assert budget.delay_s(1, QuartetError("OVERLOADED", "later", retry_after_ms=500)) >= 0.5


async def test_a_deadline_is_a_typed_error_and_ends_the_handler() -> None:
    async with _served() as (pig, stub, _running):
        error = await _failure(unary(stub.GetManifest, _ask("hold"), timeout_s=0.2))
        assert error.reason == "DEADLINE"
        async with asyncio.timeout(2):
            await pig.left.wait()


async def test_request_id_and_deadline_travel_through_a_hop() -> None:
    async with _served() as (far, far_stub, _r1), _served() as (near, near_stub, _r2):
        near.next_hop = lambda: far_stub.GetManifest(_ask(), timeout=60)
        await near_stub.GetManifest(_ask("hop"), timeout=2, metadata=(("x-request-id", "req-7"),))
        assert far.seen["request_id"] == near.seen["request_id"] == "req-7"
        # gRPC rounds the deadline up on the wire, by about one per cent.
        assert 0 < far.seen["remaining_s"] < near.seen["remaining_s"] <= 2.1


async def test_an_indecent_request_id_is_replaced() -> None:
    async with _served() as (pig, stub, _running):
        for offered in ("x" * 65, 'a"}{', ""):
            await stub.GetManifest(_ask(), timeout=2, metadata=(("x-request-id", offered),))
            assert pig.seen["request_id"] != offered and len(pig.seen["request_id"]) == 16


async def test_a_task_that_outlives_its_rpc_is_not_bound_by_its_deadline() -> None:
    after: dict[str, Any] = {}
    seen = asyncio.Event()

    async def outlive() -> None:
        after["inside"] = request_context.bounded(100.0)
        await seen.wait()
        after["afterwards"] = request_context.bounded(100.0)

    async def detached() -> None:
        after["detached"] = request_context.bounded(100.0)

    tasks: list[asyncio.Task[Any]] = []

    async def hop() -> Any:
        tasks.append(asyncio.create_task(outlive()))
        tasks.append(request_context.background(detached(), name="detached"))
        await asyncio.sleep(0.01)
        return pb.GetManifestResponse()

    async with _served() as (pig, stub, _running):
        pig.next_hop = hop
        await stub.GetManifest(_ask("hop"), timeout=2)
        seen.set()
        await asyncio.gather(*tasks)
    assert after["inside"] <= 2 and after["afterwards"] == 100.0 and after["detached"] == 100.0


async def test_a_unary_call_always_has_a_deadline() -> None:
    """Invariant 7."""
    async with _served() as (pig, stub, _running):
        await stub.GetManifest(_ask())
        assert 0 < pig.seen["remaining_s"] <= 60 * 1.02


async def test_a_silent_stream_is_given_up_and_its_handler_ends() -> None:
    """Invariant 7."""
    async with _served() as (pig, stub, _running):
        error = await _failure(_drained(stream(stub.Watch(pb.WatchRequest()), idle_timeout_s=0.2)))
        assert error.reason == "DEADLINE"
        async with asyncio.timeout(2):
            await pig.left.wait()


async def test_a_stream_left_early_ends_its_handler() -> None:
    async with _served() as (pig, stub, _running):
        async with contextlib.aclosing(stream(stub.Watch(pb.WatchRequest()), idle_timeout_s=5)) as responses:
            assert (await anext(responses)).announced.version == 1
        async with asyncio.timeout(2):
            await pig.left.wait()


async def test_a_stream_whose_server_dies_is_not_ready() -> None:
    async with _served() as (_pig, stub, running):
        responses = stream(stub.Watch(pb.WatchRequest()), idle_timeout_s=5)
        await anext(responses)
        await running.stop(0)
        assert (await _failure(anext(responses))).reason == "NOT_READY"


async def test_rpcs_beyond_the_bound_are_overloaded_but_health_answers() -> None:
    """Invariant 8."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with _served(max_concurrent_rpcs=1) as (pig, stub, running):
        held = asyncio.ensure_future(unary(stub.GetManifest, _ask("hold"), timeout_s=5))
        await pig.entered.wait()
        error = await _failure(unary(stub.GetManifest, _ask(), timeout_s=5))
        assert error.reason == "OVERLOADED" and error.retry_after_ms
        async with connect(running.address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="liveness")
            )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        pig.release.set()
        await held
        await unary(stub.GetManifest, _ask(), timeout_s=5)


def _sample(name: str, **labels: str) -> float:
    return prometheus_client.REGISTRY.get_sample_value(name, labels) or 0.0


async def test_metrics_count_by_service_method_and_code() -> None:
    labels = {"service": NAME, "method": "GetManifest"}
    before = _sample("quartet_rpc_handled_total", code="NOT_FOUND", **labels)
    strange = _sample("quartet_rpc_started_total", service="unknown", method="unknown")
    async with _served() as (_pig, stub, running), _raw(running) as channel:
        await _failure(unary(stub.GetManifest, _ask("typed"), timeout_s=5))
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/made.up/Series")(b"", timeout=5)
    assert _sample("quartet_rpc_handled_total", code="NOT_FOUND", **labels) == before + 1
    assert _sample("quartet_rpc_in_flight", **labels) == 0
    assert _sample("quartet_rpc_started_total", service="unknown", method="unknown") == strange + 1


def test_all_four_handler_kinds_are_wrapped() -> None:
    async def coroutine(_request: Any, _context: Any) -> None: ...

    async def generator(_request: Any, _context: Any) -> AsyncIterator[Any]:
        yield None

    kinds = {
        grpc.unary_unary_rpc_method_handler(coroutine): "unary_unary",
        grpc.stream_unary_rpc_method_handler(coroutine): "stream_unary",
        grpc.unary_stream_rpc_method_handler(generator): "unary_stream",
        grpc.stream_stream_rpc_method_handler(generator): "stream_stream",
    }
    interceptor = ServerInterceptor(None, 10)

    class Details:
        method = f"/{NAME}/X"
        invocation_metadata = ()

    for handler, kind in kinds.items():

        async def continuation(_details: Any, handler: Any = handler) -> Any:
            return handler

        wrapped = asyncio.run(interceptor.intercept_service(continuation, Details()))  # type: ignore[arg-type]
        assert getattr(wrapped, kind) not in (None, coroutine, generator)
        assert (wrapped.request_streaming, wrapped.response_streaming) == (
            handler.request_streaming,
            handler.response_streaming,
        )


async def _items(*delays: float) -> AsyncIterator[str]:
    for index, delay in enumerate(delays):
        await asyncio.sleep(delay)
        yield str(index)


async def test_heartbeats_fill_only_the_silence() -> None:
    """Invariant 7: every stream has a heartbeat."""
    got = [item async for item in with_heartbeats(_items(0, 0.25, 0), lambda: "beat", 0.1)]
    assert [item for item in got if item != "beat"] == ["0", "1", "2"]
    assert got[1:3] == ["beat", "beat"] and len(got) == 5


async def test_heartbeats_pass_errors_on() -> None:
    async def fails() -> AsyncIterator[str]:
        yield "0"
        raise QuartetError("NOT_READY", "gone")

    got = with_heartbeats(fails(), lambda: "beat", 1)
    assert await anext(got) == "0"
    assert (await _failure(anext(got))).reason == "NOT_READY"


async def test_leaving_heartbeats_closes_the_source() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[str]:
        try:
            await asyncio.Event().wait()
            yield ""
        finally:
            closed.set()

    async with contextlib.aclosing(with_heartbeats(endless(), lambda: "beat", 0.01)) as got:
        assert await anext(got) == "beat"
    assert closed.is_set()


async def test_heartbeats_end_when_told() -> None:
    told = asyncio.Event()
    got = with_heartbeats(_items(0, 60), lambda: "beat", 0.01, until=told)
    assert [await anext(got), await anext(got)] == ["0", "beat"]
    told.set()
    assert (await _failure(anext(got))).reason == "NOT_READY"
