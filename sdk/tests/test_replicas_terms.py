"""The terms of a generation over replicas: versions, refusals, deadlines, leaving."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from certificates import needs_openssl
from quartet.errors import QuartetError
from quartet.kit.call import RetryBudget
from quartet.kit.health import Health
from quartet.kit.security import ClientSecurity, ServerTls
from quartet.kit.server import ServerConfig, start
from quartet.replicas import Replicas, client, replica
from quartet.replicas.client import SAID_OF
from quartet.v1 import inference_service_pb2 as pb
from replica_fleet import IMPATIENT, QUICK, ask, at, check, fails, fleet, home, until
from scripted_replica import undisturbed


async def test_an_exact_version_is_looked_for_at_every_replica_once() -> None:
    """Invariant 3 and client.py 5: no token of a pinned completion comes from another version."""
    async with fleet(3) as (scripted, replicas):
        first, (second, third) = home("s", scripted)
        first.version, second.version, third.version = 5, 6, 7
        generated = await replicas.complete(ask(exact_policy_version=7), 20)
        assert {version for _, _, version in generated.completions[0].spans} == {7}
        with pytest.raises(QuartetError) as refused:
            await replicas.complete(ask(exact_policy_version=9), 20)
        assert refused.value.reason == "VERSION_UNAVAILABLE"
        assert [len(one.requests) for one in (first, second, third)] == [2, 2, 2]


@pytest.mark.parametrize("reason", ["VERSION_UNAVAILABLE", "RUN_NOT_SERVED"])
async def test_what_one_replica_does_not_serve_is_asked_of_each_other_once(reason: str) -> None:
    """client.py 5."""
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.before_piece = fails(reason)
        check(await replicas.complete(ask(), 20), "hello", undisturbed())
        second.before_piece = fails(reason)
        with pytest.raises(QuartetError, match=reason):
            await replicas.complete(ask(), 20)
        assert [len(one.requests) for one in (first, second)] == [2, 2]


async def test_versions_go_with_a_generation() -> None:
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.before_piece = at(8, fails("NOT_READY"))
        await replicas.complete(ask(exact_policy_version=1, min_policy_version=1, run_id="run"), 20)
        (again,) = second.requests
        assert (again.exact_policy_version, again.min_policy_version, again.run_id) == (1, 1, "run")


@pytest.mark.parametrize("reason", ["INVALID_REQUEST", "PROMPT_TOO_LONG", "INTERNAL", "UNAUTHENTICATED"])
async def test_what_another_replica_would_refuse_too_is_raised_at_once(reason: str) -> None:
    """client.py 5."""
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.before_piece = at(0, fails(reason))
        with pytest.raises(QuartetError) as refused:
            await replicas.complete(ask(), 20)
        assert refused.value.reason == reason and not second.requests


@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        ({"n": 3, "completion_seeds": [1, 2]}, "completion_seeds"),
        ({"n": 2, "completion_seeds": [1, 2], "sampling": {"seed": 1}}, "sampling.seed"),
        ({"n": 257}, "n"),
    ],
)
async def test_a_request_of_which_no_completions_can_be_made_is_refused(
    wanted: dict[str, Any], field: str
) -> None:
    """Also while the replicas are full, where each completion would be asked for by itself."""
    async with fleet(1) as (scripted, replicas):
        scripted[0].before_piece = fails("OVERLOADED", retry_after_ms=1)
        with pytest.raises(QuartetError) as refused:
            await replicas.complete(ask(**wanted), 20)
        assert (refused.value.reason, refused.value.metadata["field"]) == ("INVALID_REQUEST", field)


async def test_rounds_are_bounded_by_their_budget() -> None:
    """Invariant 8, client.py 3."""
    budget = RetryBudget(max_attempts=3, initial_backoff_s=0.01, max_backoff_s=0.01)
    settings = QUICK.model_copy(update={"rounds": budget})
    async with fleet(2, settings) as (scripted, replicas):
        for one in scripted:
            one.before_piece = fails("OVERLOADED", retry_after_ms=1)
        with pytest.raises(QuartetError) as refused:
            await replicas.complete(ask(), 30)
        assert refused.value.reason == "OVERLOADED"
        assert [len(one.requests) for one in scripted] == [3, 3]


async def test_no_round_is_spent_while_nobody_is_in_service() -> None:
    """client.py 3: however long all of them are away, the caller's deadline alone ends the wait for them."""
    budget = RetryBudget(max_attempts=1, initial_backoff_s=0.01, max_backoff_s=0.01)
    settings = QUICK.model_copy(update={"rounds": budget})
    async with fleet(2, settings) as (scripted, replicas):
        await asyncio.gather(*(one.end() for one in scripted))
        await until(lambda: not replicas.in_service)
        waiting = asyncio.create_task(replicas.complete(ask(), 20))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await scripted[1].begin(scripted[1].address)
        check(await waiting, "hello", undisturbed())


async def test_a_deadline_ends_everything() -> None:
    """Invariant 7, client.py 1, fleet.py 2: whether there is no replica, a silent one or one that refuses."""
    async with fleet(1, IMPATIENT) as ((only,), replicas):
        for script, reason in (
            (lambda _at: asyncio.sleep(60), "DEADLINE"),
            (fails("OVERLOADED", retry_after_ms=50), "OVERLOADED"),
            (fails("NOT_READY"), "NOT_READY"),
        ):
            only.before_piece = script
            started = time.monotonic()
            with pytest.raises(QuartetError) as ended:
                await replicas.complete(ask(), 1.5)
            # A busy machine may hold the last answer back for so long that it counts as silence.
            assert ended.value.reason in {reason, "DEADLINE"}
            assert time.monotonic() - started < 30  # of the minutes that the silence or the rounds would take
            only.before_piece = lambda _at: None
            await replicas.complete(ask(max_tokens=1), 30)
        await only.end()
        await until(lambda: not replicas.in_service)
        with pytest.raises(QuartetError) as ended:
            await replicas.complete(ask(), 0.8)
        assert ended.value.reason == "NOT_READY"
        told = ended.value.message
        assert (
            f"came into service before the deadline ({only.address}: " in told
            and "Cancelling all calls)" in told
        ), told


async def test_where_a_name_has_no_replica_it_is_told() -> None:
    """And each address is told once of several that are away, as far as a person reads."""
    private = ClientSecurity(insecure_ok_off_loopback=True)
    async with Replicas(["dns:///nowhere.invalid:5"], private, QUICK) as nowhere:
        with pytest.raises(QuartetError, match=r"\(dns:///nowhere.invalid:5: none is known\)") as ended:
            await nowhere.complete(ask(), 0.8)
        assert ended.value.reason == "NOT_READY"
    async with fleet(SAID_OF + 2) as (scripted, replicas):
        await asyncio.gather(*(one.end() for one in scripted))
        await until(lambda: bool(replicas.out_of_reach))
        with pytest.raises(QuartetError) as ended:
            await replicas.complete(ask(), 0.8)
        assert sum(one.address in ended.value.message for one in scripted) == SAID_OF
        assert ended.value.message.endswith(" and 2 more)")


@needs_openssl
async def test_a_replica_whose_tls_is_another_says_so(pki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """replica.py: its health stream waits for a connection, and would wait without a word."""
    monkeypatch.setattr(replica, "ANSWER_SECONDS", 1.0)
    tls = ServerTls(cert_file=pki / "server.crt", key_file=pki / "server.key")
    server = await start([], ServerConfig(tls=tls), Health())
    for security, said in (
        (ClientSecurity(), "TLS wants ca_file"),
        (ClientSecurity(ca_file=pki / "other.crt"), "TLS: its certificate is of no authority"),
    ):
        async with Replicas([server.address], security, QUICK) as replicas:
            await until(lambda r=replicas, s=said: s in r.out_of_reach)
            with pytest.raises(QuartetError, match=said):
                await replicas.complete(ask(), 0.8)
    await server.stop(0)


async def test_what_the_last_replica_failed_with_is_told_with_where_it_was() -> None:
    """client.py 1: it ended, and nobody came after it."""
    async with fleet(1) as ((only,), replicas):
        ending: list[asyncio.Task[None]] = []

        async def ends(_at: int) -> None:
            ending.append(asyncio.create_task(only.end()))
            await asyncio.sleep(60)

        only.before_piece = ends
        with pytest.raises(QuartetError) as ended:
            await replicas.complete(ask(), 4)
        assert ended.value.reason == "NOT_READY", ended.value
        first, found, last = ended.value.message.partition(
            "; after that no inference replica came into service"
        )
        assert first and found and only.address in last, ended.value.message


async def test_no_pause_between_two_rounds_outlasts_the_deadline() -> None:
    """client.py 1."""
    settings = QUICK.model_copy(update={"rounds": RetryBudget(max_backoff_s=60)})
    async with fleet(1, settings) as ((only,), replicas):
        only.before_piece = fails("OVERLOADED", retry_after_ms=60_000)
        with pytest.raises(QuartetError, match="OVERLOADED"):
            async with asyncio.timeout(40):
                await replicas.complete(ask(), 10)


async def test_why_nobody_sampled_is_told_before_the_callers_own_clock_ends_its_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 5: an absence of all replicas is one, and not the caller's time that passed."""
    monkeypatch.setattr(client, "LAST_MOMENT_SECONDS", 10.0)  # a busy machine is seconds late
    async with fleet(1) as ((only,), replicas):
        await replicas.complete(ask(max_tokens=1), 9.0)  # less than that moment is enough where one serves
        await only.end()
        await until(lambda: not replicas.in_service)
        with pytest.raises(QuartetError) as ended:
            async with asyncio.timeout(10.5):
                await replicas.complete(ask(), 10.5)
        assert ended.value.reason == "NOT_READY"


async def test_leaving_and_cancelling_reach_the_replica() -> None:
    """client.py 1."""
    async with fleet(2) as (scripted, replicas):
        first, _ = home("s", scripted)
        first.before_piece = at(8, lambda: asyncio.sleep(60))
        async with aclosing(replicas.generate(ask(n=2), 60)) as frames:
            async for frame in frames:
                if frame.HasField("delta"):
                    break
        await until(lambda: first.running == 0)
        first.before_piece = at(0, lambda: asyncio.sleep(60))
        task = asyncio.create_task(replicas.complete(ask(), 60))
        await until(lambda: first.running == 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until(lambda: first.running == 0)


@pytest.mark.parametrize("completions", [1, 3])
async def test_what_is_under_way_ends_with_the_client(completions: int) -> None:
    """Invariant 7: closing a channel cancels its calls, also where each completion goes on by itself."""
    async with fleet(1) as ((only,), replicas):
        cut = at(8, fails("NOT_READY"))
        only.before_piece = lambda sampled: cut(sampled) or (asyncio.sleep(60) if sampled >= 8 else None)
        task = asyncio.create_task(replicas.complete(ask(n=completions), 60))
        await until(lambda: only.running == completions and len(only.requests) == 1 + completions)
        await replicas.__aexit__(None, None, None)
        await asyncio.wait([task], timeout=5)
        assert task.done() and task.cancelled()


async def test_frames_outside_the_contract_are_refused() -> None:
    """Invariant 6, generation.py 2."""
    wrong = [
        pb.GenerateDelta(token_ids=[1, 2], logprobs=[-1.0], spans=[{"start": 0, "length": 2}]),
        pb.GenerateDelta(token_ids=[1], logprobs=[-1.0]),
        pb.GenerateDelta(token_ids=[1], logprobs=[-1.0], spans=[{"start": 1, "length": 1}]),
        pb.GenerateDelta(token_ids=[1, 2], logprobs=[-1, -1], spans=[{"start": 0, "length": 1}]),
        pb.GenerateDelta(index=1, token_ids=[1], logprobs=[-1], spans=[{"start": 0, "length": 1}]),
    ]
    async with fleet(1) as ((only,), replicas):
        for delta in wrong:
            only._piece = lambda *_: pb.GenerateResponse(delta=delta)  # type: ignore[method-assign]  # noqa: B023
            with pytest.raises(QuartetError) as refused:
                await replicas.complete(ask(max_tokens=only.piece_tokens), 20)
            assert refused.value.reason == "INTERNAL" and "contract" in refused.value.message


async def test_a_replica_to_which_the_weights_cannot_come_is_left_for_another_one() -> None:
    """client.py 4."""
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.held_up = "versions are not announced"
        generated = await replicas.complete(ask(min_policy_version=1, n=2), 20)
        assert [len(one.token_ids) for one in generated.completions] == [22, 22]
        assert (len(first.requests), len(second.requests)) == (1, 1)
        assert len(replicas.in_service) == 2, "it has no other fault"


async def test_a_replica_that_only_waits_is_not_left_and_what_for_is_known() -> None:
    """GenerateResponse.waits_for"""
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.waits_for = "version 9 of run r; version 1 is served"
        waiting = asyncio.create_task(replicas.complete(ask(run_id="r", min_policy_version=9), 60))
        await until(lambda: bool(replicas.waiting))
        assert replicas.waiting == {("r", 9, None): first.waits_for}
        first.waits_for = ""
        await waiting
        assert (len(first.requests), len(second.requests)) == (1, 0) and not replicas.waiting
        first.waits_for = "Resume: decoding is paused (Pause)"
        with pytest.raises(QuartetError, match="it waited for Resume: decoding is paused") as ended:
            await replicas.complete(ask(), 1.5)
        assert ended.value.reason == "DEADLINE" and not replicas.waiting


async def test_where_the_weights_come_to_nobody_they_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """client.py 4."""
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.held_up = second.held_up = "versions are not announced"
        waiting = asyncio.create_task(replicas.complete(ask(), 60))
        await until(lambda: second.running == 1)
        await asyncio.sleep(0.5)
        assert (len(first.requests), len(second.requests)) == (1, 1), "nobody runs from one to the other"
        second.held_up = ""
        await waiting
        # The one that is waited at is not the one that is reached again.
        monkeypatch.setattr(client, "HELD_UP_SECONDS", 0.3)
        second.held_up = first.held_up
        waiting = asyncio.create_task(replicas.complete(ask(), 20))
        await until(lambda: second.running == 1)
        first.held_up = ""
        await waiting
        assert len(second.requests) == 2
    async with fleet(1) as ((alone,), replicas):
        alone.held_up = "versions are not announced"
        waiting = asyncio.create_task(replicas.complete(ask(), 20))
        await asyncio.sleep(0.5)
        alone.held_up = ""
        await waiting
        assert len(alone.requests) == 1
