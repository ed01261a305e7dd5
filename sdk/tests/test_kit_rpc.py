"""What a server makes of every RPC: typed errors, limits, metrics, over real loopback gRPC."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import prometheus_client
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from guinea_pig import NAME, ask, drained, failure, raw, served
from quartet.errors import QuartetError, from_rpc
from quartet.kit import options
from quartet.kit.call import RetryBudget, stream, unary
from quartet.kit.channel import connect
from quartet.kit.intercept import ServerInterceptor, _let_go, _Rpc
from quartet.kit.options import MAX_MESSAGE_BYTES
from quartet.kit.server import RunningServer
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc


async def test_a_typed_error_arrives_typed() -> None:
    """call.py 1, intercept.py 4."""
    async with served() as (_pig, stub, _running):
        error = await failure(unary(stub.GetManifest, ask("typed"), timeout_s=20))
        assert (error.reason, error.metadata) == ("RUN_UNKNOWN", {"run_id": "typed"})
        streamed = await failure(
            drained(stream(stub.Watch(pb.WatchRequest(run_id="typed")), idle_timeout_s=20))
        )
        assert streamed.reason == "RUN_UNKNOWN"


async def test_a_refusal_that_repeats_is_logged_once_and_told_to_everyone() -> None:
    async with served() as (_pig, stub, _running):
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                assert (
                    await failure(unary(stub.GetManifest, ask("typed"), timeout_s=20))
                ).reason == "RUN_UNKNOWN"
            watching = stream(stub.Watch(pb.WatchRequest(run_id="typed")), idle_timeout_s=20)
            assert (await failure(drained(watching))).reason == "RUN_UNKNOWN"
        refused = [line["rpc"] for line in logs if line["event"] == "rpc refused"]
        assert refused == [f"/{NAME}/GetManifest", f"/{NAME}/Watch"]


async def test_a_crash_tells_the_caller_only_its_request_id() -> None:
    """intercept.py 4."""
    async with served() as (pig, stub, _running):
        error = await failure(unary(stub.GetManifest, ask("crash"), timeout_s=20))
        assert error.reason == "INTERNAL" and "secret" not in str(error) + str(error.metadata)
        assert error.metadata == {"request_id": pig.seen["request_id"]}
        responses = stream(stub.Watch(pb.WatchRequest(run_id="crash")), idle_timeout_s=20)
        error = await failure(drained(responses))
        assert error.reason == "INTERNAL" and "secret" not in str(error)


@pytest.mark.parametrize("told", ["typed", "crash"])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_refused_call_holds_on_to_nothing(told: str, streams: bool) -> None:
    """gRPC's server keeps its last refusal until the next call: a trainer without calls kept a torn run."""
    async with served() as (pig, stub, _running):
        if streams:
            await failure(drained(stream(stub.Watch(pb.WatchRequest(run_id=told)), idle_timeout_s=20)))
        else:
            await failure(unary(stub.GetManifest, ask(told), timeout_s=20))
        assert pig.in_memory is not None
        gc.collect()
        assert pig.in_memory() is None


def test_however_an_error_led_to_a_refusal_it_holds_on_to_nothing() -> None:
    """Also where they go round in a ring."""

    def raised(error: Exception) -> Exception:
        try:
            raise error
        except Exception as caught:  # noqa: BLE001
            return caught

    cause, context, member = raised(KeyError()), raised(ValueError()), raised(LookupError())
    error = raised(ExceptionGroup("several", [member]))
    error.__cause__, cause.__context__, context.__context__ = cause, context, error
    _let_go(error)
    assert [one.__traceback__ for one in (error, cause, context, member)] == [None] * 4


@pytest.mark.parametrize("method", ["GetManifest", "Watch", "Push"])
async def test_malformed_bytes_are_an_invalid_request(method: str) -> None:
    """intercept.py 4."""
    async with served() as (pig, _stub, running), raw(running) as channel:
        path = f"/{NAME}/{method}"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if method == "GetManifest":
                await channel.unary_unary(path)(b"\xff\xff", timeout=20)
            elif method == "Watch":
                await channel.unary_stream(path)(b"\xff\xff", timeout=20).read()
            else:
                await channel.stream_unary(path)(iter([b"\xff\xff"]), timeout=20)
        error = from_rpc(caught.value)
        assert (error.reason, error.metadata["field"]) == ("INVALID_REQUEST", "request")
        assert pig.calls == 0 and pig.pushed == []


async def test_an_oversize_request_is_refused_and_changes_nothing() -> None:
    """Invariant 8 and options.py 1: messages at 4 MiB."""
    async with served() as (pig, stub, running):
        large = pb.GetManifestRequest(run_id="x" * (MAX_MESSAGE_BYTES + 1))
        error = await failure(unary(stub.GetManifest, large, timeout_s=20, budget=RetryBudget()))
        assert error.reason == "INVALID_REQUEST"
        async with raw(running) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{NAME}/GetManifest")(large.SerializeToString(), timeout=20)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert pig.calls == 0
        assert await unary(stub.GetManifest, ask(), timeout_s=20) == pb.GetManifestResponse()


async def test_an_oversize_response_is_our_fault_and_says_so() -> None:
    """intercept.py 4: to whoever asked, and in the log; also in the middle of a stream."""
    told = r"has 41943\d\d bytes, and a message 4194304 at most \(4 MiB\); ask for less in one call"
    async with served() as (pig, stub, _running):
        with structlog.testing.capture_logs() as logs:
            error = await failure(unary(stub.GetManifest, ask("huge"), timeout_s=20))
            watching = stream(stub.Watch(pb.WatchRequest(run_id="huge")), idle_timeout_s=20)
            streamed = await failure(drained(watching))
        assert (error.reason, streamed.reason) == ("INTERNAL", "INTERNAL")
        assert re.fullmatch(f"the answer of GetManifest {told}", error.message)
        assert re.fullmatch(f"the answer of Watch {told}", streamed.message)
        assert error.metadata == {"request_id": pig.seen["request_id"]}
        said = [line["message"] for line in logs if line["log_level"] == "error"]
        assert said == [error.message, streamed.message]


async def test_an_unknown_method_has_an_error_info() -> None:
    async with served() as (_pig, _stub, running), raw(running) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{NAME}/Nope")(b"", timeout=20)
        error = from_rpc(caught.value)
        assert (error.reason, error.metadata) == ("NOT_IMPLEMENTED", {"rpc": f"/{NAME}/Nope"})


async def test_client_streams_reach_the_handler() -> None:
    async with served() as (pig, stub, _running):
        frames = [pb.PushRequest(chunk=pb.WeightChunk(data=bytes(size))) for size in (1, 2)]
        assert (await unary(stub.Push, iter(frames), timeout_s=20)).version == 2
        assert pig.pushed == [1, 2]


async def test_rpcs_beyond_the_bound_are_overloaded_but_health_answers() -> None:
    """Invariant 8, intercept.py 3, options.py 4."""
    async with served(max_concurrent_rpcs=1) as (pig, stub, running):
        held = asyncio.ensure_future(unary(stub.GetManifest, ask("hold"), timeout_s=20))
        await pig.entered.wait()
        error = await failure(unary(stub.GetManifest, ask(), timeout_s=20))
        assert error.reason == "OVERLOADED" and error.retry_after_ms
        assert "as many as server.max_concurrent_rpcs allows" in error.message
        assert await _refused_unread(running) == "OVERLOADED"
        async with connect(running.address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="liveness")
            )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        pig.release.set()
        await held
        await unary(stub.GetManifest, ask(), timeout_s=20)


async def test_connections_beyond_the_bound_are_closed_and_those_within_serve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """options.py 5: whoever connects and says nothing takes up no more of the service's descriptors."""
    monkeypatch.setattr(options, "MAX_CONNECTIONS", 3)
    async with served() as (_pig, stub, running):
        await unary(stub.GetManifest, ask(), timeout_s=20)
        host, _, port = running.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        # What a server says first to whoever it took.
        assert all([await asyncio.wait_for(reader.read(1), 20) for reader, _writer in silent])
        one_more, writer = await asyncio.open_connection(host, int(port))
        with suppress(ConnectionResetError):  # what was sent to it may be lost with it
            assert await asyncio.wait_for(one_more.read(1), 20) == b""
        await unary(stub.GetManifest, ask(), timeout_s=20)
        for one in (writer, *(writer for _reader, writer in silent)):
            one.close()
        async with connect(running.address) as channel:
            get = rpc.WeightServiceStub(channel).GetManifest
            # Until the service has seen these close.
            await unary(get, ask(), timeout_s=20, wait_for_ready=True)


class _Unread:
    """Of a call whose caller does not read why it is refused."""

    async def abort_with_status(self, _status: object) -> None:
        await asyncio.Event().wait()

    def time_remaining(self) -> None:
        return None


async def test_a_refusal_that_nobody_reads_takes_no_place() -> None:
    """intercept.py 3: whoever is refused keeps nobody else out, over the bound or for a fault of its own.

    `test_rpcs_beyond_the_bound_are_overloaded_but_health_answers` failed once in a long while: gRPC may go on
    with the sending of a refusal after the next call has come.
    """
    interceptor = ServerInterceptor(None, max_concurrent_rpcs=1)
    refused = QuartetError("RUN_UNKNOWN", "no run")

    async def fails() -> None:
        async with interceptor._guard(_Rpc(f"/{NAME}/GetManifest", None), _Unread()):
            raise refused

    sending = [asyncio.ensure_future(fails()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(one.done() for one in sending)
    async with asyncio.timeout(20), interceptor._guard(_Rpc(f"/{NAME}/GetManifest", None), _Unread()):
        sending.append(asyncio.ensure_future(fails()))
        await asyncio.sleep(0)
        assert interceptor._under_way == 1
    async with asyncio.timeout(20), interceptor._guard(_Rpc(f"/{NAME}/GetManifest", None), _Unread()):
        pass
    for one in sending:
        one.cancel()
    await asyncio.wait(sending)
    assert all(one.cancelled() for one in sending) and interceptor._under_way == 0


async def _refused_unread(running: RunningServer) -> str:
    """Why a request is refused that cannot be parsed."""
    async with raw(running) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/{NAME}/GetManifest")(b"\xff\xff", timeout=20)
    return from_rpc(caught.value).reason


async def test_who_has_no_token_is_refused_before_a_byte_is_parsed(tmp_path: Path) -> None:
    """intercept.py 3: a stranger reaches no parser, and counts among no RPCs that are parsed."""
    (tmp_path / "token").write_text("secret")
    async with served(token_file=tmp_path / "token") as (pig, _stub, running):
        assert await _refused_unread(running) == "UNAUTHENTICATED"
        async with raw(running) as channel:
            call = channel.stream_unary(f"/{NAME}/Push")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(iter([b"\xff\xff"]), timeout=20)
        assert from_rpc(caught.value).reason == "UNAUTHENTICATED"
        assert pig.calls == 0 and pig.pushed == []
        async with raw(running) as channel:
            probe = health_pb2_grpc.HealthStub(channel)
            asked = health_pb2.HealthCheckRequest(service="liveness")
            assert (await probe.Check(asked, timeout=20)).status == health_pb2.HealthCheckResponse.SERVING


def _sample(name: str, **labels: str) -> float:
    return prometheus_client.REGISTRY.get_sample_value(name, labels) or 0.0


async def test_metrics_count_by_service_method_and_code() -> None:
    """intercept.py 2, metrics.py 1."""
    labels = {"service": NAME, "method": "GetManifest"}
    before = _sample("quartet_rpc_handled_total", code="NOT_FOUND", **labels)
    strange = _sample("quartet_rpc_started_total", service="unknown", method="unknown")
    of_health = {"service": "grpc.health.v1.Health", "method": "Check"}
    probed = _sample("quartet_rpc_handled_total", code="NOT_FOUND", **of_health)
    async with served() as (_pig, stub, running), raw(running) as channel:
        await failure(unary(stub.GetManifest, ask("typed"), timeout_s=20))
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/made.up/Series")(b"", timeout=20)
        # What aborts by itself has its own code.
        probe = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await probe.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=20)
    assert _sample("quartet_rpc_handled_total", code="NOT_FOUND", **of_health) == probed + 1
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
