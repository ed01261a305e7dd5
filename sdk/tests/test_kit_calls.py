"""Deadlines, retries and the context of a call, over real loopback gRPC (quartet.kit.call, .context)."""

from __future__ import annotations

import asyncio
import contextvars
import time
from typing import Any

import pytest
from guinea_pig import ask, failure, served
from quartet.errors import QuartetError
from quartet.kit import context as request_context
from quartet.kit.call import RetryBudget, stream, unary
from quartet.kit.channel import connect
from quartet.v1 import weights_pb2 as pb
from quartet.v1 import weights_pb2_grpc as rpc


async def test_retries_stay_within_the_budget() -> None:
    """Invariant 8, call.py 1 and 2."""
    quick = RetryBudget(max_attempts=5, initial_backoff_s=0.001, max_backoff_s=0.002)
    async with served() as (pig, stub, _running):
        await unary(stub.GetManifest, ask("flaky"), timeout_s=20, budget=quick)
        assert pig.calls == 3
        pig.calls = -10
        assert (
            await failure(unary(stub.GetManifest, ask("flaky"), timeout_s=20, budget=quick))
        ).reason == "OVERLOADED"
        assert pig.calls == -5
        await failure(unary(stub.GetManifest, ask("typed"), timeout_s=20, budget=quick))
        assert pig.calls == -4, "what repeating cannot mend is not repeated"


async def test_retries_stay_within_the_deadline() -> None:
    """call.py 2."""
    budget = RetryBudget(max_attempts=1000, initial_backoff_s=0.05, max_backoff_s=0.1)
    async with connect("127.0.0.1:1") as channel:
        began = time.monotonic()
        error = await failure(
            unary(rpc.WeightServiceStub(channel).GetManifest, ask(), timeout_s=0.5, budget=budget)
        )
        assert error.reason in ("NOT_READY", "DEADLINE")
        assert time.monotonic() - began < 20  # of the minute that a thousand attempts would take


async def test_what_cannot_be_tried_again_before_the_deadline_is_told_at_once() -> None:
    """call.py 2: a peer that asks for more time than there is, and one that is away."""
    patient = RetryBudget(max_backoff_s=60)

    async def full() -> Any:
        raise QuartetError("OVERLOADED", "full", retry_after_ms=60_000)

    async with asyncio.timeout(25), served() as (pig, stub, _running), connect("127.0.0.1:1") as channel:
        pig.next_hop = full
        error = await failure(unary(stub.GetManifest, ask("hop"), timeout_s=30, budget=patient))
        assert error.reason == "OVERLOADED" and pig.calls == 1
        away = rpc.WeightServiceStub(channel).GetManifest
        assert (await failure(unary(away, ask(), timeout_s=30))).reason == "NOT_READY"


def test_backoff_is_jittered_capped_and_respects_the_peer() -> None:
    budget = RetryBudget(initial_backoff_s=0.1, max_backoff_s=1.0)
    plain = QuartetError("NOT_READY", "later")
    delays = {budget.delay_s(30, plain) for _ in range(50)}
    assert len(delays) > 40 and max(delays) <= 1.0
    for attempt, ceiling_s in ((1, 0.1), (2, 0.2), (4, 0.8), (5, 1.0), (10**6, 1.0)):
        drawn = max(budget.delay_s(attempt, plain) for _ in range(50))
        assert ceiling_s / 2 < drawn <= ceiling_s, "50 draws below a half: 1 in 10^15"
    assert budget.delay_s(1, QuartetError("OVERLOADED", "later", retry_after_ms=500)) >= 0.5


async def test_a_deadline_is_a_typed_error_and_ends_the_handler() -> None:
    async with served() as (pig, stub, _running):
        while not pig.entered.is_set():  # a busy machine may need all of the time for the way there
            error = await failure(unary(stub.GetManifest, ask("hold"), timeout_s=0.2))
            assert error.reason == "DEADLINE"
        async with asyncio.timeout(30):
            await pig.left.wait()


async def test_request_id_and_deadline_travel_through_a_hop() -> None:
    """context.py 1, channel.py 2 and 3, intercept.py 1."""
    async with served() as (far, far_stub, _r1), served() as (near, near_stub, _r2):
        near.next_hop = lambda: far_stub.GetManifest(ask(), timeout=60)
        await near_stub.GetManifest(ask("hop"), timeout=20, metadata=(("x-request-id", "req-7"),))
        assert far.seen["request_id"] == near.seen["request_id"] == "req-7"
        # gRPC rounds the deadline up on the wire, by about one per cent.
        assert 0 < far.seen["remaining_s"] < near.seen["remaining_s"] <= 21


@pytest.mark.parametrize(("left_s", "allowed_s"), [(0.1, 0.09), (1.0, 0.94), (600.0, 593.95)])
def test_a_hop_leaves_time_to_tell_of_its_failure_and_never_much_of_what_is_left(
    monkeypatch: pytest.MonkeyPatch, left_s: float, allowed_s: float
) -> None:
    """channel.py 3."""
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)

    def bounded() -> tuple[float | None, float | None]:
        request_context.enter(None, left_s)
        return request_context.bounded(None), request_context.bounded(0.05)

    assert contextvars.copy_context().run(bounded) == (pytest.approx(allowed_s), 0.05)


async def test_a_stream_does_not_outlive_the_rpc_in_whose_handling_it_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """channel.py 3: also where the handler gives it no timeout; there is time left to say why."""
    monkeypatch.setattr(request_context, "MARGIN_SECONDS", 1.0)  # a tenth of what is left, then
    told: list[QuartetError] = []

    async def hop() -> Any:
        watching = stream(far_stub.Watch(pb.WatchRequest()), idle_timeout_s=30)
        assert (await anext(watching)).announced.version == 1
        told.append(await failure(anext(watching)))
        return pb.GetManifestResponse()

    async with served() as (far, far_stub, _r1), served() as (near, near_stub, _r2):
        near.next_hop = hop
        async with asyncio.timeout(60):
            while True:
                try:
                    await unary(near_stub.GetManifest, ask("hop"), timeout_s=1.0)
                    break
                except QuartetError as late:  # a busy machine may take that tenth, too
                    assert late.reason == "DEADLINE"
            assert {one.reason for one in told} == {"DEADLINE"}
            await far.left.wait()


async def test_an_indecent_request_id_is_replaced() -> None:
    """context.py 1."""
    async with served() as (pig, stub, _running):
        for offered in ("x" * 65, 'a"}{', ""):
            await stub.GetManifest(ask(), timeout=20, metadata=(("x-request-id", offered),))
            assert pig.seen["request_id"] != offered and len(pig.seen["request_id"]) == 16


async def test_a_task_that_outlives_its_rpc_is_not_bound_by_its_deadline() -> None:
    """context.py 2 and 3."""
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

    async with served() as (pig, stub, _running):
        pig.next_hop = hop
        await stub.GetManifest(ask("hop"), timeout=20)
        seen.set()
        await asyncio.gather(*tasks)
    assert after["inside"] <= 20 and after["afterwards"] == 100.0 and after["detached"] == 100.0


async def test_a_unary_call_always_has_a_deadline() -> None:
    """Invariant 7, channel.py 3."""
    async with served() as (pig, stub, _running):
        await stub.GetManifest(ask())
        assert 0 < pig.seen["remaining_s"] <= 60 * 1.02


@pytest.mark.parametrize("timeout_s", [float("inf"), 2.0**63])
async def test_whoever_gives_a_call_all_the_time_there_is_is_not_told_that_it_is_over(
    timeout_s: float,
) -> None:
    """gRPC counts nanoseconds in 64 bits: beyond them its deadline was in the past."""
    async with served() as (_pig, stub, _running):
        await unary(stub.GetManifest, ask(), timeout_s=timeout_s)
        watching = stream(stub.Watch(pb.WatchRequest(), timeout=timeout_s), idle_timeout_s=20)
        assert await anext(watching)
        await watching.aclose()
