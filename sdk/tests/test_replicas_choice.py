"""Which replica a generation is begun at: affinity, bounded loads, who is in service (quartet.replicas)."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from quartet.kit import context as request_context
from quartet.kit import health
from quartet.replicas import Replicas
from quartet.replicas import fleet as replicas_fleet
from quartet.replicas.choice import LOAD_FACTOR, LOAD_SLACK, NUMBERED_SLACK, choose, ranking
from quartet.replicas.fleet import SPREAD_SECONDS
from quartet.replicas.replica import State
from quartet.v1 import inference_service_pb2_grpc as rpc
from replica_fleet import IMPATIENT, QUICK, ask, at, begun, check, fails, fleet, home, until
from scripted_replica import NAME, ScriptedReplica, undisturbed


async def test_a_session_stays_at_home_and_sessions_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_fleet, "SETTLE_SECONDS", 30.0)  # however late a home answers at the start
    async with fleet(3, settled=False) as (scripted, replicas):
        for session in range(120):
            for _ in range(2):
                await replicas.complete(ask(session=f"s{session}", max_tokens=1), 40)
        where = [{request.session_id for request in one.requests} for one in scripted]
        assert sum(map(len, where)) == 120, "both calls of a session went to one replica"
        assert all(len(sessions) >= 15 for sessions in where), "by ports of chance: fewer are 1 in 10^6"


async def test_at_the_start_a_session_waits_for_a_home_that_has_not_answered_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its prompt would be computed twice; but not for long, or one that is away would hold its own up."""
    monkeypatch.setattr(replicas_fleet, "SETTLE_SECONDS", 30.0)
    # Not a `fleet`: channels of one process share connections, and one that broke is an answer.
    async with begun(2) as scripted:
        first, (second,) = home("s", scripted)
        await first.end()
        async with Replicas([one.address for one in scripted], settings=QUICK) as replicas:
            await until(lambda: replicas.in_service == [second.address])
            waiting = asyncio.create_task(replicas.complete(ask(max_tokens=1), 60))
            await asyncio.sleep(0.3)
            assert not second.requests
            monkeypatch.setattr(replicas_fleet, "SETTLE_SECONDS", 0.1)
            await replicas.complete(ask(max_tokens=1), 20)
            assert len(second.requests) == 1
            await first.begin(first.address)
            await waiting
            assert len(first.requests) == 1


def test_every_process_ranks_alike() -> None:
    """choice.py 1: hosts that share a session need not speak to each other, nor be restarted together."""
    program = (
        "from quartet.replicas.choice import ranking\n"
        "addresses = [f'10.0.0.{i}:50051' for i in range(8)]\n"
        "print([ranking(f's{i}', addresses) for i in range(50)])\n"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    told_otherwise = [f"10.0.0.{i}:50051" for i in reversed(range(8))]
    assert said == {f"{[ranking(f's{i}', told_otherwise) for i in range(50)]}\n"}


def test_a_replica_that_comes_or_goes_moves_only_its_own_sessions() -> None:
    """choice.py 1."""
    addresses = [f"10.0.0.{i}:50051" for i in range(8)]
    homes = {f"s{i}": ranking(f"s{i}", addresses)[0] for i in range(4000)}
    counts = [sum(one == home for home in homes.values()) for one in addresses]
    assert max(counts) < 1.25 * 500 and min(counts) > 0.75 * 500
    without = {session: ranking(session, addresses[:-1])[0] for session in homes}
    moved = [session for session in homes if homes[session] != without[session]]
    assert moved == [session for session, home in homes.items() if home == addresses[-1]]


def test_numbered_groups_are_spread_evenly_by_clients_that_do_not_talk() -> None:
    """choice.py 2: each group goes to one replica whole, and none has more than one group beyond an even
    share. Of two environments that alternate neither has replicas of its own."""
    addresses, size, chance = [f"10.0.0.{i}:50051" for i in range(64)], 16, random.Random(1)
    for groups in (128, 512):
        clients = [dict.fromkeys(addresses, 0) for _ in range(16)]
        homes = dict[int, str]()
        for number in range(groups):
            loads = chance.choice(clients)
            for _ in range(size):
                home = choose(f"run/group#{number}", loads)
                loads[home] += 1
                assert homes.setdefault(number, home) == home, "the whole group, which shares its prompt"
        for begin in range(0, groups - 64, 7):  # whichever of them are under way
            under_way = [homes[number] for number in range(begin, begin + 64)]
            assert max(map(under_way.count, addresses)) <= 2
        counts = [list(homes.values()).count(one) for one in addresses]
        assert max(counts) == min(counts) == groups // 64
    assert len({homes[number] for number in range(0, 512, 2)}) == 64


def test_a_numbered_session_comes_home_and_a_large_group_is_not_left_to_one_replica() -> None:
    """choice.py 2 and 3."""
    addresses = [f"10.0.0.{i}:50051" for i in range(8)]
    homes = {number: choose(f"g#{number}", dict.fromkeys(addresses, 0)) for number in range(80)}
    left = dict.fromkeys(addresses[1:], 0)
    without = {number: choose(f"g#{number}", left, addresses) for number in homes}
    moved = [number for number in homes if homes[number] != without[number]]
    assert moved == [number for number, home in homes.items() if home == addresses[0]] and len(moved) == 10
    assert len({without[number] for number in moved}) > 2, "those of one that is away go to several others"
    loads = dict.fromkeys(addresses, 0)
    for _ in range(800):
        loads[choose("g#0", loads)] += 1
    assert max(loads.values()) <= LOAD_FACTOR * 100 + NUMBERED_SLACK + 1
    assert ranking("g#0", []) == [] and ranking("g#x", addresses)[0] in addresses


def test_loads_are_bounded_and_small_groups_stay_together() -> None:
    """choice.py 3 and 4."""
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
        crowd = [asyncio.create_task(replicas.complete(ask(max_tokens=1), 60)) for _ in range(60)]
        await until(lambda: len(first.requests) + len(second.requests) == 60)
        assert len(first.requests) > len(second.requests) > 0
        gate.set()
        await asyncio.gather(*crowd)


async def test_one_that_is_not_serving_is_passed_over_until_it_serves() -> None:
    """replica.py 1."""
    async with fleet(2) as (scripted, replicas):
        first, _others = home("s", scripted)
        first.health.set_not_ready(NAME, "its canary disagreed")
        await until(lambda: len(replicas.in_service) == 1)
        await replicas.complete(ask(max_tokens=1), 20)
        assert not first.requests
        first.health.set_ready(NAME)
        await until(lambda: len(replicas.in_service) == 2)
        await replicas.complete(ask(max_tokens=1), 20)
        assert len(first.requests) == 1


async def test_one_without_a_health_service_counts_as_serving_and_is_asked_again_after_a_fault() -> None:
    """replica.py 1: a program of somebody else's that speaks the contract and no more."""
    plain = ScriptedReplica()
    server = grpc.aio.server()
    rpc.add_InferenceServiceServicer_to_server(plain, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with Replicas([address], settings=IMPATIENT) as replicas:
        await until(lambda: replicas.in_service == [address])
        plain.before_piece = at(8, lambda: asyncio.sleep(60))  # frozen, once
        check(await replicas.complete(ask(), 30), "hello", undisturbed())
        assert len(plain.requests) >= 2
    await server.stop(0)


async def test_the_health_of_one_that_is_doubted_is_asked_for_by_one_call_at_a_time() -> None:
    """replica.py 2: each doubt would else leave a stream behind, until the replica takes no more of them."""
    async with fleet(1) as ((only,), replicas):
        watching: set[object] = set()
        most, changes = 0, health.HealthServicer._changes

        async def counted(servicer: Any, key: str) -> AsyncIterator[Any]:
            nonlocal most
            watching.add(mark := object())
            most = max(most, len(watching))
            try:
                async for change in changes(servicer, key):
                    yield change
            finally:
                watching.discard(mark)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(health.HealthServicer, "_changes", counted)
            for _ in range(8):
                only.before_piece = at(0, fails("NOT_READY"))
                await replicas.complete(ask(max_tokens=1), 20)
                await until(lambda: len(watching) == 1)
        assert most <= 2, "the one that was given up may be there for a moment"
        await only.end()
        await until(lambda: not replicas.in_service)
        await asyncio.sleep(0.5)
        await only.begin(only.address)
        await until(lambda: len(replicas.in_service) == 1)


async def test_one_that_was_doubted_in_an_rpc_is_not_taken_out_again_at_its_deadline() -> None:
    """replica.py 1: whose health is asked for outlives the call that failed."""

    async def in_an_rpc() -> None:
        _, scope = request_context.enter(None, 2.0)
        await replicas.complete(ask(max_tokens=1), 20)
        scope.close()

    async with fleet(1) as ((only,), replicas):
        only.before_piece = at(0, fails("NOT_READY"))
        await asyncio.create_task(in_an_rpc())
        assert len(only.requests) == 2
        (replica,) = replicas._fleet.replicas
        back_since = replica.since
        await asyncio.sleep(2.2)
        assert (replica.state, replica.since) == (State.SERVING, back_since)


async def test_where_all_are_full_the_earliest_is_waited_for_and_not_by_all_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """fleet.py 3."""
    async with fleet(2) as (_, replicas):
        # When each of them meant to come back: a busy machine brings them back later, and together.
        meant, timeout = list[float](), asyncio.timeout

        def noted(delay_s: float) -> asyncio.Timeout:
            meant.append(time.monotonic() - began + delay_s)
            return timeout(delay_s)

        began, (first, second) = time.monotonic(), replicas._fleet.replicas
        first.refused(1000)
        second.refused(60_000)
        with monkeypatch.context() as patched:
            patched.setattr(replicas_fleet, "asyncio", SimpleNamespace(timeout=noted))
            coming = [asyncio.create_task(replicas._fleet.find("", (), began + 30)) for _ in range(30)]
            await asyncio.sleep(0)  # all of them wait
        assert len(meant) == 30
        assert {one and one.address for one in await asyncio.gather(*coming)} == {first.address}
        assert time.monotonic() - began >= 1.0
        assert min(meant) >= 1.0 and max(meant) < 1.0 + SPREAD_SECONDS + 0.5
        assert max(meant) - min(meant) > SPREAD_SECONDS / 3, "30 draws within a third: 1 in 10^13"


async def test_a_full_replica_is_spared_for_as_long_as_it_asked() -> None:
    """replica.py 3, fleet.py 3."""
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.before_piece = at(0, fails("OVERLOADED", retry_after_ms=60_000))
        await replicas.complete(ask(max_tokens=1), 20)
        await replicas.complete(ask(max_tokens=1), 20)
        assert len(first.requests) == 1 and len(second.requests) == 2
        (full,) = [one for one in replicas._fleet.replicas if one.full]
        assert full.address == first.address
        full.refused_until -= 60.0  # as if that time had passed
        await replicas.complete(ask(max_tokens=1), 20)
        assert len(first.requests) == 2


async def test_who_is_not_inside_is_told_at_once() -> None:
    """fleet.py 2: before, after, and while it waits."""
    replicas = Replicas(["127.0.0.1:1"], settings=QUICK)
    with pytest.raises(RuntimeError, match=r"not followed: ask them inside of 'async with Replicas"):
        await asyncio.wait_for(replicas.complete(ask(), 600), 5)
    async with replicas:
        waiting = asyncio.create_task(replicas.complete(ask(), 600))
        await asyncio.sleep(0)
        assert not waiting.done()
    with pytest.raises(RuntimeError, match="are not followed"):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(RuntimeError, match="are not followed"):
        await asyncio.wait_for(replicas.complete(ask(), 600), 5)
