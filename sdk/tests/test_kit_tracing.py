"""Traces of calls over real loopback gRPC, as a collector has them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from guinea_pig import NAME, ask, failure, raw, served
from quartet.kit import context as request_context
from quartet.kit import tracing
from quartet.kit.call import stream, unary
from quartet.kit.channel import connect
from quartet.kit.security import TokenFile
from quartet.v1 import (
    envhost_service_pb2,
    inference_service_pb2,
    orchestrator_service_pb2,
    trainer_service_pb2,
)
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc
from span_collector import Collected, Collector, collecting_here

GET = f"{NAME}/GetManifest"
PLACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting_here(monkeypatch) as running:
        yield running


def _sides(collector: Collector, name: str = GET) -> tuple[Collected, Collected]:
    """A call as its client and its server tell it."""
    (client,), (server,) = collector.named(name, "CLIENT"), collector.named(name, "SERVER")
    assert (server.trace_id, server.parent_id) == (client.trace_id, client.span_id)
    return client, server


def _code(span: Collected) -> tuple[str, str]:
    return span.attributes["rpc.response.status_code"], span.status


async def test_a_call_is_one_trace_with_the_ids_of_both_sides(collector: Collector) -> None:
    """tracing.py 5."""
    with tracing.exporting("test"):
        async with served() as (_pig, stub, running):
            with tracing.span("step", root=True, run_id="run", step=3):
                await unary(stub.GetManifest, ask("run"), timeout_s=20)
    client, server = _sides(collector)
    (step,) = collector.named("step")
    assert client.parent_id == step.span_id and step.parent_id == ""
    assert step.attributes == {"quartet.run_id": "run", "quartet.step": 3}
    assert _code(client) == _code(server) == ("OK", "")
    shared = {"rpc.system.name": "grpc", "rpc.method": GET, "rpc.response.status_code": "OK"}
    request_id = client.attributes["quartet.request_id"]
    both = {**shared, "quartet.request_id": request_id}
    of_run = {"server.address": running.address, "quartet.run_id": "run"}
    assert client.attributes == {**both, **of_run} and request_id
    assert server.attributes == {**both, "quartet.run_id": "run"}
    resource = client.resource
    assert (resource["service.name"], resource["process.pid"]) == ("quartet-test", os.getpid())


async def test_what_is_done_for_a_run_says_so(collector: Collector) -> None:
    """tracing.py 6: below the span or the request that names it, in this process and the next; and nothing
    beside it does."""
    carried = list[str]()
    with tracing.exporting("test"):
        async with served() as (pig, stub, _running), served() as (_other, next_stub, _next):
            pig.next_hop = lambda: next_stub.GetManifest(ask())
            await unary(stub.GetManifest, ask("hop"), timeout_s=20)

        async def of_a_run() -> None:
            tracing.about("one")
            with tracing.span("of one"):
                tracing.past("earlier", 1.0, 2.0)
                place = tracing.here()
                with tracing.span("of another", run_id="other"), tracing.span("deep"):
                    carried.append(tracing.carried())
                with tracing.span("root", root=True):
                    pass
            with tracing.span("still of another run", run_id="other"), tracing.span("back", within=place):
                pass

        async def in_the_next_process() -> None:
            tracing.go_on(carried[0])
            with tracing.span("there"):
                pass

        for work in (of_a_run, in_the_next_process):
            await asyncio.create_task(work())
        with tracing.span("of none"):
            pass
    found = {one.name: one.attributes.get("quartet.run_id") for one in collector.spans if "/" not in one.name}
    assert found == {
        **{"of one": "one", "earlier": "one", "back": "one", "of another": "other", "deep": "other"},
        **{"there": "other", "still of another run": "other", "root": None, "of none": None},
    }
    (deep,), (there,) = collector.named("deep"), collector.named("there")
    assert (there.trace_id, there.parent_id) == (deep.trace_id, deep.span_id)
    # A call says what its server was asked for; the next one is made while that is answered.
    of_calls = Counter((one.kind, one.attributes.get("quartet.run_id")) for one in collector.named(GET))
    assert of_calls == {
        ("CLIENT", None): 1,  # whoever asks is in no run
        ("SERVER", "hop"): 1,
        ("CLIENT", "hop"): 1,
        ("SERVER", None): 1,  # which names none
    }


def test_the_first_message_of_a_stream_says_which_run_it_is_of() -> None:
    start = trainer_service_pb2.ForwardBackwardRequest()
    start.start.run_id = "one"
    rollouts = envhost_service_pb2.InteractRequest()
    rollouts.run.run_id = "two"
    batch = trainer_service_pb2.ForwardBackwardRequest(batch=trainer_service_pb2.SampleBatch())
    assert [tracing._run_of(one) for one in (start, rollouts, batch)] == ["one", "two", ""]


async def test_what_a_caller_makes_long_is_not_kept_long(collector: Collector) -> None:
    """otel.py 2: before anybody looks at it, an id may have the size of a message."""
    with tracing.exporting("test"):
        async with served() as (_pig, stub, _running):
            await unary(stub.GetManifest, ask("r" * 1_000_000), timeout_s=20)
    _client, server = _sides(collector)
    assert server.attributes["quartet.run_id"] == "r" * 1024


async def test_calls_made_while_one_is_handled_are_below_it(collector: Collector) -> None:
    with tracing.exporting("test"):
        async with served() as (pig, stub, _running), served() as (_other, next_stub, _next):
            pig.next_hop = lambda: next_stub.GetManifest(ask())
            await unary(stub.GetManifest, ask("hop"), timeout_s=20)
    (deepest,) = [one for one in collector.spans if len(collector.above(one)) == 3]
    kinds = [line.split()[1] for line in collector.above(deepest)]
    assert (deepest.kind, kinds) == ("SERVER", ["CLIENT", "SERVER", "CLIENT"])


async def test_failures_are_told_as_the_conventions_have_it(collector: Collector) -> None:
    with tracing.exporting("test"):
        async with served() as (_pig, stub, _running):
            await failure(unary(stub.GetManifest, ask("typed"), timeout_s=20))
            await failure(unary(stub.GetManifest, ask("crash"), timeout_s=20))
    told = {one.attributes["quartet.reason"]: one for one in collector.named(GET, "SERVER")}
    client = {_code(one) for one in collector.named(GET, "CLIENT")}
    # What its caller did wrong is no error of a server.
    assert {reason: _code(one) for reason, one in told.items()} == {
        "RUN_UNKNOWN": ("NOT_FOUND", ""),
        "INTERNAL": ("INTERNAL", "ERROR"),
    }
    assert client == {("NOT_FOUND", "ERROR"), ("INTERNAL", "ERROR")}


async def test_a_call_that_is_left_ends_its_spans(collector: Collector) -> None:
    with tracing.exporting("test"):
        async with served() as (pig, stub, _running):
            calling = asyncio.create_task(unary(stub.GetManifest, ask("hold"), timeout_s=60))
            await pig.entered.wait()
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
            await pig.left.wait()
    client, server = _sides(collector)
    assert _code(client) == _code(server) == ("CANCELLED", "")


async def test_a_deadline_ends_its_spans(collector: Collector) -> None:
    with tracing.exporting("test"):
        async with served() as (pig, stub, _running):
            while not pig.entered.is_set():  # a busy machine may need all of the time for the way there
                await failure(unary(stub.GetManifest, ask("hold"), timeout_s=0.2))
            await pig.left.wait()
    (server,) = collector.named(GET, "SERVER")
    client = collector.parent(server)
    assert client is not None and client.said.endswith(f"CLIENT {GET}")
    assert _code(client) == ("DEADLINE_EXCEEDED", "ERROR")


async def test_a_call_that_cannot_begin_ends_its_span(collector: Collector) -> None:
    with tracing.exporting("test"):
        async with served() as (_pig, stub, running):
            await running.stop(0)
            await failure(unary(stub.GetManifest, ask(), timeout_s=20))
    (client,) = collector.named(GET, "CLIENT")
    assert _code(client) == ("UNAVAILABLE", "ERROR")


async def test_streams_end_their_spans(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to its end, and one that is left."""
    monkeypatch.setattr(tracing, "UNTRACED", frozenset())
    with tracing.exporting("test"):
        async with served() as (pig, stub, _running):
            chunks = [pb.PushRequest(chunk=pb.WeightChunk(data=b"x"))] * 3
            assert (await stub.Push(iter(chunks))).version == 3
            async with contextlib.aclosing(stream(stub.Watch(pb.WatchRequest()), idle_timeout_s=20)) as said:
                await anext(said)
            await pig.left.wait()
    client, server = _sides(collector, f"{NAME}/Push")
    assert _code(client) == _code(server) == ("OK", "")
    client, server = _sides(collector, f"{NAME}/Watch")
    assert _code(client) == _code(server) == ("CANCELLED", "")


async def test_watching_and_health_have_no_spans(collector: Collector) -> None:
    """tracing.py 6."""
    with tracing.exporting("test"):
        async with served() as (_pig, stub, running):
            async with contextlib.aclosing(stream(stub.Watch(pb.WatchRequest()), idle_timeout_s=20)) as said:
                await anext(said)
            async with connect(running.address) as channel:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            await unary(stub.GetManifest, ask(), timeout_s=20)
    assert {one.name for one in collector.spans} == {GET}


def test_every_rpc_without_spans_is_one_of_the_contract() -> None:
    """tracing.py 7."""
    modules = (inference_service_pb2, orchestrator_service_pb2, trainer_service_pb2, envhost_service_pb2, pb)
    files = [module.DESCRIPTOR for module in modules]
    known = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert known >= tracing.UNTRACED


@pytest.mark.parametrize(
    ("offered", "parent"),
    [
        (PLACE, PLACE.split("-")[2]),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b71692-01", ""),
        ("ff-" + PLACE[3:], ""),
        ("00-" + "0" * 32 + "-b7ad6b7169203331-01", ""),
        ("nonsense", ""),
        ("", ""),
    ],
)
async def test_a_place_that_is_malformed_counts_for_nothing(
    collector: Collector, offered: str, parent: str
) -> None:
    """tracing.py 5."""
    with tracing.exporting("test"):
        async with served() as (_pig, _stub, running), raw(running) as channel:
            metadata = (("traceparent", offered), ("tracestate", "a=b"))
            await rpc.WeightServiceStub(channel).GetManifest(ask(), metadata=metadata)
    (server,) = collector.named(GET, "SERVER")
    assert server.parent_id == parent


async def test_who_is_refused_begins_no_span(collector: Collector, tmp_path: Path) -> None:
    """tracing.py 5."""
    token = tmp_path / "token"
    token.write_text("secret-of-some-length\n")
    with tracing.exporting("test"):
        async with served(token_file=token) as (_pig, _stub, running), raw(running) as channel:
            known, unknown = (
                rpc.WeightServiceStub(channel).GetManifest,
                channel.unary_unary("/quartet.v1.X/Y"),
            )
            for method, asked in ((known, ask()), (unknown, b"")):
                with pytest.raises(grpc.RpcError, match="token"):
                    await method(asked, metadata=(("traceparent", PLACE),))
            said = f"Bearer {TokenFile(token).read()}"
            await rpc.WeightServiceStub(channel).GetManifest(ask(), metadata=(("authorization", said),))
    (server,) = collector.spans
    assert _code(server) == ("OK", "")


async def test_what_outlives_an_rpc_from_the_start_is_not_below_it(collector: Collector) -> None:
    async def work() -> None:
        with tracing.span("work"):
            pass

    with tracing.exporting("test"), tracing.span("rpc"):
        await asyncio.create_task(work())
        await request_context.background(work(), name="work")
    assert sorted(bool(one.parent_id) for one in collector.named("work")) == [False, True]


def test_spans_say_how_they_ended_and_what_else_they_are_for(collector: Collector) -> None:
    with tracing.exporting("test"):
        with tracing.span("other"):
            other = tracing.here()
        with pytest.raises(KeyError), tracing.span("raised", root=True):
            raise KeyError
        with tracing.span("failed", within=other, links=[None, other], members=2) as span:
            span.set(kind="HOST")
            span.fail("it died")
            tracing.event("first_token")
            tracing.note(more=True)
            tracing.past("scoring", time.time() - 1, time.time())
            tracing.past("never", 0.0, 0.0)
        with pytest.raises(asyncio.CancelledError), tracing.span("left"):
            raise asyncio.CancelledError
    (left,) = collector.named("left")
    assert (left.status, left.attributes) == ("", {"quartet.cancelled": True})
    (raised,), (failed,), (scoring,) = (collector.named(name) for name in ("raised", "failed", "scoring"))
    assert raised.status == failed.status == "ERROR" and scoring.status == ""
    (first,) = collector.named("other")
    assert (failed.parent_id, failed.links, failed.events) == (
        first.span_id,
        (first.span_id,),
        ("first_token",),
    )
    assert failed.attributes == {"quartet.members": 2, "quartet.kind": "HOST", "quartet.more": True}
    assert scoring.parent_id == failed.span_id and scoring.end_ns - scoring.start_ns > 9e8
    assert not collector.named("never")


def test_lines_of_the_log_name_their_trace(collector: Collector) -> None:
    def line() -> dict[str, Any]:
        named: dict[str, Any] = tracing.name_trace(None, "info", {"event": "x"})
        return named

    assert line() == {"event": "x"}
    with tracing.exporting("test"):
        assert line() == {"event": "x"}
        with tracing.span("work"):
            said = line()
    (work,) = collector.named("work")
    assert (said["trace_id"], said["span_id"]) == (work.trace_id, work.span_id)
