"""Generations over several replicas (quartet.replicas), against servers that sample as the contract says."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.call import RetryBudget
from quartet.kit.channel import ClientSecurity
from quartet.replicas import Replicas, Settings
from quartet.replicas.addresses import Addresses
from quartet.replicas.choice import LOAD_FACTOR, LOAD_SLACK, choose, ranking
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb

HERE = Path(__file__).resolve().parent
DOCUMENTATION = (HERE.parents[1] / "docs/replicas.md").read_text()
QUICK = Settings(
    idle_timeout_seconds=0.5,
    resolve_seconds=0.1,
    rounds=RetryBudget(max_attempts=50, initial_backoff_s=0.02, max_backoff_s=0.1),
)

_spec = importlib.util.spec_from_file_location("scripted_replica", HERE / "scripted_replica.py")
assert _spec is not None and _spec.loader is not None
scripted_replica = importlib.util.module_from_spec(_spec)
sys.modules["scripted_replica"] = scripted_replica
_spec.loader.exec_module(scripted_replica)
ScriptedReplica, NAME = scripted_replica.ScriptedReplica, scripted_replica.NAME
undisturbed, logprob = scripted_replica.undisturbed, scripted_replica.logprob


@asynccontextmanager
async def fleet(
    count: int, settings: Settings = QUICK, *, settled: bool = True
) -> AsyncIterator[tuple[list[Any], Replicas]]:
    """Scripted replicas and a client of them; `settled` once all are in service."""
    scripted = [ScriptedReplica() for _ in range(count)]
    async with AsyncExitStack() as stack:
        for one in scripted:
            await one.begin()
            stack.push_async_callback(one.end)
        replicas = await stack.enter_async_context(
            Replicas([one.address for one in scripted], settings=settings)
        )
        if settled:
            await until(lambda: len(replicas.in_service) == count)
        yield scripted, replicas


def ask(text: str = "hello", session: str = "s", max_tokens: int = 22, **fields: Any) -> pb.GenerateRequest:
    sampling = {"max_tokens": max_tokens, **fields.pop("sampling", {})}
    return pb.GenerateRequest(
        messages=pb.MessagesPrompt(messages=[common_pb2.Message(role="user", content=text)]),
        sampling=common_pb2.SamplingParams(**sampling),
        session_id=session,
        **fields,
    )


def home(session: str, scripted: list[Any]) -> tuple[Any, list[Any]]:
    """The replica that a session ranks first, and the others in their order."""
    by_address = {one.address: one for one in scripted}
    first, *others = [by_address[one] for one in ranking(session, list(by_address))]
    return first, others


def at(sampled: int, action: Callable[[], Any]) -> Callable[[int], Any]:
    """A script that acts once, when so many tokens are sampled."""
    left = [action]

    def before(now: int) -> Any:
        return left.pop()() if now >= sampled and left else None

    return before


def fails(reason: str, **metadata: Any) -> Callable[[], Any]:
    def action() -> Any:
        raise QuartetError(reason, "scripted", **metadata)

    return action


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other tasks
            await asyncio.sleep(0.01)


def check(generated: Any, text: str, wanted: list[int]) -> None:
    """The answer is exactly the undisturbed one."""
    assert generated.prompt_ids == [ord(c) for c in text]
    (completion,) = generated.completions
    assert completion.token_ids == wanted
    assert completion.logprobs == [logprob(token) for token in wanted]
    assert [start for start, _, _ in completion.spans] == [
        sum(length for _, length, _ in completion.spans[:i]) for i in range(len(completion.spans))
    ]
    assert sum(length for _, length, _ in completion.spans) == len(wanted)
    assert completion.message.content == " ".join(map(str, wanted))
    assert completion.usage.prompt_tokens == len(text)
    assert completion.usage.completion_tokens == len(wanted)


async def test_the_program_in_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    program = DOCUMENTATION.split("```python\n")[1].split("```")[0]
    async with fleet(2) as (scripted, _):
        for number, one in enumerate(scripted):
            assert f"127.0.0.1:5005{number + 1}" in program
            program = program.replace(f"127.0.0.1:5005{number + 1}", one.address)
        namespace: dict[str, Any] = {}
        exec(program.replace("asyncio.run(main())", ""), namespace)
        await namespace["main"]()
    assert capsys.readouterr().out.count("(0, 4, 1)") == 8


# --- affinity -----------------------------------------------------------------------------------------------


async def test_a_session_stays_at_home_and_sessions_are_spread() -> None:
    async with fleet(3, settled=False) as (scripted, replicas):
        for session in range(60):
            for _ in range(2):
                await replicas.complete(ask(session=f"s{session}", max_tokens=1), 5)
        where = [{request.session_id for request in one.requests} for one in scripted]
        assert sum(map(len, where)) == 60, "both calls of a session went to one replica"
        assert all(len(sessions) >= 8 for sessions in where)


def test_a_replica_that_comes_or_goes_moves_only_its_own_sessions() -> None:
    addresses = [f"10.0.0.{i}:50051" for i in range(8)]
    homes = {f"s{i}": ranking(f"s{i}", addresses)[0] for i in range(4000)}
    counts = [sum(one == home for home in homes.values()) for one in addresses]
    assert max(counts) < 1.25 * 500 and min(counts) > 0.75 * 500
    without = {session: ranking(session, addresses[:-1])[0] for session in homes}
    moved = [session for session in homes if homes[session] != without[session]]
    assert moved == [session for session, home in homes.items() if home == addresses[-1]]


def test_loads_are_bounded_and_small_groups_stay_together() -> None:
    loads = dict.fromkeys("abcd", 0)
    first = ranking("hot", list(loads))[0]
    for _ in range(LOAD_SLACK):
        assert choose("hot", loads) == first
        loads[first] += 1
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed={seed}")
    chance = random.Random(seed)
    for _ in range(2000):
        loads[choose(chance.choice(["hot", "hot", str(chance.random())]), loads)] += 1
        bound = LOAD_FACTOR * sum(loads.values()) / len(loads) + LOAD_SLACK + 1
        assert max(loads.values()) <= bound
    assert choose("", {"a": 3, "b": 1, "c": 2}) == "b"


async def test_a_crowded_home_spills_over() -> None:
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        gate = asyncio.Event()
        first.before_piece = lambda _at: gate.wait()
        crowd = [asyncio.create_task(replicas.complete(ask(max_tokens=1), 10)) for _ in range(60)]
        await until(lambda: len(first.requests) + len(second.requests) == 60)
        assert len(first.requests) > len(second.requests) > 0
        gate.set()
        await asyncio.gather(*crowd)


# --- carrying on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["NOT_READY", "OVERLOADED", "DEADLINE"])
async def test_a_generation_is_gone_on_with_from_the_tokens_it_has(reason: str) -> None:
    """Invariant 6: no token lost, none sampled twice."""
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        second.version = 2
        first.before_piece = at(8, fails(reason))
        generated = await replicas.complete(ask(), 5)
        check(generated, "hello", undisturbed())
        assert {version for start, _, version in generated.completions[0].spans if start >= 8} == {2}
        (again,) = second.requests
        assert again.resumed_tokens == 8 and len(again.tokens.token_ids) == 5 + 8
        assert not again.tokens.tail_messages and again.session_id == "s"
        everything = first.sampled + second.sampled
        assert len(set(everything)) == len(everything) == 22, "each token was sampled once"
        assert (replicas.counts.carried_on, replicas.counts.carried_tokens) == (1, 8)


async def test_a_replica_that_dies_is_left_and_sessions_come_home_afterwards() -> None:
    """Invariant 9."""
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.before_piece = at(8, lambda: asyncio.create_task(first.end()))
        check(await replicas.complete(ask(), 5), "hello", undisturbed())
        assert replicas.in_service == [second.address]
        await replicas.complete(ask(max_tokens=1), 5)
        assert len(second.requests) == 2
        await first.begin(first.address)
        await until(lambda: len(replicas.in_service) == 2)
        await replicas.complete(ask(max_tokens=1), 5)
        assert len(second.requests) == 2 and len(first.requests) == 2


async def test_the_only_replica_is_waited_for() -> None:
    """Invariants 7 and 9."""
    async with fleet(1) as ((only,), replicas):
        only.before_piece = at(8, lambda: asyncio.create_task(only.end()))
        answer = asyncio.create_task(replicas.complete(ask(), 20))
        await until(lambda: only.server is None)
        await asyncio.sleep(0.3)
        await only.begin(only.address)
        check(await answer, "hello", undisturbed())


async def test_a_frozen_replica_is_left_after_the_idle_time() -> None:
    """Invariant 7."""
    async with fleet(2) as (scripted, replicas):
        first, _others = home("s", scripted)
        first.before_piece = at(8, lambda: asyncio.sleep(60))
        started = time.monotonic()
        check(await replicas.complete(ask(), 20), "hello", undisturbed())
        assert QUICK.idle_timeout_seconds <= time.monotonic() - started < 3
        await until(lambda: first.running == 0)


async def test_one_that_is_not_serving_is_passed_over_until_it_serves() -> None:
    async with fleet(2) as (scripted, replicas):
        first, _others = home("s", scripted)
        first.health.set_not_ready(NAME, "its canary disagreed")
        await until(lambda: len(replicas.in_service) == 1)
        await replicas.complete(ask(max_tokens=1), 5)
        assert not first.requests
        first.health.set_ready(NAME)
        await until(lambda: len(replicas.in_service) == 2)
        await replicas.complete(ask(max_tokens=1), 5)
        assert len(first.requests) == 1


async def test_a_full_replica_is_spared_for_as_long_as_it_asked() -> None:
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.before_piece = at(0, lambda: _raise(QuartetError("OVERLOADED", "full", retry_after_ms=300)))
        await replicas.complete(ask(max_tokens=1), 5)
        await replicas.complete(ask(max_tokens=1), 5)
        assert len(first.requests) == 1 and len(second.requests) == 2
        await asyncio.sleep(0.35)
        await replicas.complete(ask(max_tokens=1), 5)
        assert len(first.requests) == 2


def _raise(error: Exception) -> None:
    raise error


async def test_random_faults_change_nothing() -> None:
    """Invariants 6 and 9: 40 generations, every replica failing at random."""
    seed = int(os.environ.get("QUARTET_FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"QUARTET_FAULT_SEED={seed}")
    chance = random.Random(seed)

    def disturb(_at: int) -> Any:
        if chance.random() < 0.05:
            raise QuartetError(chance.choice(["NOT_READY", "OVERLOADED"]), "scripted", retry_after_ms=20)
        return asyncio.sleep(0.002) if chance.random() < 0.3 else None

    async with fleet(3) as (scripted, replicas):
        for one in scripted:
            one.before_piece = disturb

        async def one_of(number: int) -> None:
            text, sampling = f"prompt {number}", {"seed": 7 * number + 1}
            generated = await replicas.complete(
                ask(text, f"s{number % 9}", max_tokens=60, sampling=sampling), 60
            )
            check(generated, text, undisturbed(text, 60, 7 * number + 1))

        await asyncio.gather(*(one_of(number) for number in range(40)))
        everything = [token for one in scripted for token in one.sampled]
        assert len(everything) >= 40 * 60
        assert replicas.counts.carried_on > 0


async def test_several_completions_are_carried_on_each_by_itself() -> None:
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.before_piece = at(8, fails("NOT_READY"))
        generated = await replicas.complete(ask(n=3), 5)
        assert [request.n for request in first.requests] == [3], "one call shares the prompt"
        later = sorted(request.resumed_tokens for request in second.requests)
        assert later == [8, 8, 8] and {request.n for request in second.requests} == {1}
        for completion in generated.completions:
            assert len(completion.token_ids) == len(completion.logprobs) == 22
        everything = first.sampled + second.sampled
        assert len(everything) == 3 * 22


async def test_seeded_completions_have_seeds_of_their_own() -> None:
    async with fleet(2) as (scripted, replicas):
        first, _ = home("s", scripted)
        first.before_piece = at(8, fails("NOT_READY"))
        generated = await replicas.complete(ask(n=3, sampling={"seed": 40}), 5)
        for index, completion in enumerate(generated.completions):
            assert completion.token_ids == undisturbed(seed=40 + index)


async def test_a_request_that_was_itself_gone_on_with() -> None:
    """A client of ours may have begun elsewhere: positions count from the completion's first token."""
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.before_piece = at(14, fails("NOT_READY"))
        had = undisturbed()[:6]
        request = pb.GenerateRequest(
            tokens=pb.TokensPrompt(token_ids=[*map(ord, "hello"), *had]),
            resumed_tokens=6,
            session_id="s",
            sampling=common_pb2.SamplingParams(max_tokens=22),
        )
        (completion,) = (await replicas.complete(request, 5)).completions
        assert had + completion.token_ids == undisturbed()
        assert completion.spans[0][0] == 6 and second.requests[0].resumed_tokens == 14


# --- versions, refusals, deadlines --------------------------------------------------------------------------


async def test_an_exact_version_is_looked_for_at_every_replica_once() -> None:
    """Invariant 3: no token of a pinned completion comes from another version."""
    async with fleet(3) as (scripted, replicas):
        first, (second, third) = home("s", scripted)
        first.version, second.version, third.version = 5, 6, 7
        generated = await replicas.complete(ask(exact_policy_version=7), 5)
        assert {version for _, _, version in generated.completions[0].spans} == {7}
        with pytest.raises(QuartetError) as refused:
            await replicas.complete(ask(exact_policy_version=9), 5)
        assert refused.value.reason == "VERSION_UNAVAILABLE"
        assert [len(one.requests) for one in (first, second, third)] == [2, 2, 2]


async def test_versions_go_with_a_generation() -> None:
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.before_piece = at(8, fails("NOT_READY"))
        await replicas.complete(ask(exact_policy_version=1, min_policy_version=1, run_id="run"), 5)
        (again,) = second.requests
        assert (again.exact_policy_version, again.min_policy_version, again.run_id) == (1, 1, "run")


@pytest.mark.parametrize("reason", ["INVALID_REQUEST", "PROMPT_TOO_LONG", "INTERNAL", "UNAUTHENTICATED"])
async def test_what_another_replica_would_refuse_too_is_raised_at_once(reason: str) -> None:
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.before_piece = at(0, fails(reason))
        with pytest.raises(QuartetError) as refused:
            await replicas.complete(ask(), 5)
        assert refused.value.reason == reason and not second.requests


async def test_rounds_are_bounded_by_their_budget() -> None:
    """Invariant 8."""
    budget = RetryBudget(max_attempts=3, initial_backoff_s=0.01, max_backoff_s=0.01)
    settings = QUICK.model_copy(update={"rounds": budget})
    async with fleet(2, settings) as (scripted, replicas):
        for one in scripted:
            one.before_piece = lambda _at: _raise(QuartetError("OVERLOADED", "full", retry_after_ms=1))
        with pytest.raises(QuartetError) as refused:
            await replicas.complete(ask(), 30)
        assert refused.value.reason == "OVERLOADED"
        assert [len(one.requests) for one in scripted] == [3, 3]


async def test_a_deadline_ends_everything() -> None:
    """Invariant 7: no replica, a silent one, one that always refuses: the call ends in time."""
    async with fleet(1) as ((only,), replicas):
        for script, reasons in (
            (lambda _at: asyncio.sleep(60), {"DEADLINE"}),
            (lambda _at: _raise(QuartetError("OVERLOADED", "full", retry_after_ms=50)), {"OVERLOADED"}),
            (lambda _at: _raise(QuartetError("NOT_READY", "starting")), {"NOT_READY"}),
        ):
            only.before_piece = script
            started = time.monotonic()
            with pytest.raises(QuartetError) as ended:
                await replicas.complete(ask(), 1.5)
            assert ended.value.reason in reasons and time.monotonic() - started < 2.5
            only.before_piece = lambda _at: None
            await replicas.complete(ask(max_tokens=1), 10)
        await only.end()
        with pytest.raises(QuartetError) as ended:
            await replicas.complete(ask(), 0.5)
        assert ended.value.reason == "NOT_READY"


async def test_leaving_and_cancelling_reach_the_replica() -> None:
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


async def test_frames_outside_the_contract_are_refused() -> None:
    """Invariant 6."""
    wrong = [
        pb.GenerateDelta(token_ids=[1, 2], logprobs=[-1.0]),
        pb.GenerateDelta(token_ids=[1], logprobs=[-1.0], spans=[{"start": 1, "length": 1}]),
        pb.GenerateDelta(token_ids=[1, 2], logprobs=[-1, -1], spans=[{"start": 0, "length": 1}]),
        pb.GenerateDelta(index=1, token_ids=[1], logprobs=[-1], spans=[{"start": 0, "length": 1}]),
    ]
    async with fleet(1) as ((only,), replicas):
        for delta in wrong:
            only._piece = lambda *_: pb.GenerateResponse(delta=delta)  # type: ignore[method-assign]  # noqa: B023
            with pytest.raises(QuartetError) as refused:
                await replicas.complete(ask(), 5)
            assert refused.value.reason == "INTERNAL" and "contract" in refused.value.message


# --- coming and going ---------------------------------------------------------------------------------------


async def test_a_name_is_followed_as_its_addresses_change(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ScriptedReplica(), ScriptedReplica()
    await first.begin("127.0.0.1:0")
    port = int(first.address.rpartition(":")[2])
    await second.begin(f"127.0.0.2:{port}")
    hosts = ["127.0.0.1"]
    lookups = 0

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        nonlocal lookups
        lookups += 1
        assert host == "localhost"
        if not hosts:
            raise socket.gaierror("no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in hosts]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with Replicas([f"dns:///localhost:{port}"], settings=QUICK) as replicas:
        await until(lambda: replicas.in_service == [first.address])
        hosts.append("127.0.0.2")
        await until(lambda: set(replicas.in_service) == {first.address, second.address})
        seen, hosts[:] = lookups, []
        await until(lambda: lookups > seen + 1)
        assert len(replicas.in_service) == 2, "an outage of the name takes no replica away"
        gate = asyncio.Event()
        first.before_piece = lambda _at: gate.wait()
        session = next(f"s{i}" for i in range(99) if home(f"s{i}", [first, second])[0] is first)
        slow = asyncio.create_task(replicas.complete(ask(session=session), 10))
        await until(lambda: first.running == 1)
        hosts[:] = ["127.0.0.2"]
        await until(lambda: replicas.in_service == [second.address])
        await replicas.complete(ask(session=session, max_tokens=1), 5)
        assert len(second.requests) == 1 and not slow.done()
        gate.set()
        check(await slow, "hello", undisturbed())
        assert not replicas.counts.carried_on, "what is in flight ends where it is"
    await first.end()
    await second.end()


async def test_whoever_accepts_and_never_answers_is_not_waited_for() -> None:
    """Invariant 7."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        black_hole = f"127.0.0.1:{silent.getsockname()[1]}"
        one = ScriptedReplica()
        await one.begin()
        session = next(
            f"s{i}" for i in range(99) if ranking(f"s{i}", [black_hole, one.address])[0] == black_hole
        )
        async with Replicas([black_hole, one.address], settings=QUICK) as replicas:
            started = time.monotonic()
            await replicas.complete(ask(session=session, max_tokens=1), 10)
            assert time.monotonic() - started < 3
            started = time.monotonic()
            await replicas.complete(ask(session=session, max_tokens=1), 10)
            assert time.monotonic() - started < 0.5, "its home is waited for once"
        await one.end()


async def test_names_are_checked_against_the_certificate_of_the_name() -> None:
    security = ClientSecurity(tls=True)
    found = await Addresses(["dns:///localhost:5", "10.0.0.9:5"], security).now()
    assert found.pop("10.0.0.9:5").server_name == ""
    assert found and all(one.server_name == "localhost" for one in found.values())
    named = ClientSecurity(tls=True, server_name="inference")
    found = await Addresses(["dns:///localhost:5"], named).now()
    assert {one.server_name for one in found.values()} == {"inference"}


@pytest.mark.parametrize(
    ("addresses", "text"),
    [
        ([], "0 addresses"),
        (["10.0.0.1:5"], "off loopback"),
        (["dns:///localhost"], "write dns:///name:port"),
        (["dns://8.8.8.8/localhost:5"], "write dns:///name:port"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(addresses: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Replicas(addresses)


async def test_addresses_can_be_replaced() -> None:
    async with fleet(2) as ((one, two), replicas):
        await replicas.follow([two.address])
        assert replicas.in_service == [two.address]
        await replicas.follow([one.address, two.address])
        await until(lambda: len(replicas.in_service) == 2)


async def test_addresses_replaced_twice_at_once_are_those_of_the_last_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first call's look-up ends last, and leaves neither its addresses nor a task behind."""
    answered = asyncio.Event()

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        if port == 1:
            await answered.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with fleet(1) as ((one,), replicas):
        port = one.address.rpartition(":")[2]
        calls = [asyncio.create_task(replicas.follow([f"dns:///localhost:{at}"])) for at in (1, port)]
        await asyncio.sleep(0.05)
        answered.set()
        await asyncio.gather(*calls)
        await until(lambda: replicas.in_service == [one.address])
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "follow replicas"]
