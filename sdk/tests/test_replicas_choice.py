"""Which replica a generation is begun at: affinity, bounded loads, who is in service (quartet.replicas)."""

from __future__ import annotations

import asyncio
import random

from quartet.replicas.choice import LOAD_FACTOR, LOAD_SLACK, choose, ranking
from replica_fleet import QUICK, ask, at, fails, fleet, home, until
from scripted_replica import NAME


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
    # Not about silence: on a busy machine sixty requests take longer than QUICK lets a replica be silent.
    async with fleet(2, QUICK.model_copy(update={"idle_timeout_seconds": 30.0})) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        gate = asyncio.Event()
        first.before_piece = lambda _at: gate.wait()
        crowd = [asyncio.create_task(replicas.complete(ask(max_tokens=1), 10)) for _ in range(60)]
        await until(lambda: len(first.requests) + len(second.requests) == 60)
        assert len(first.requests) > len(second.requests) > 0
        gate.set()
        await asyncio.gather(*crowd)


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
        first.before_piece = at(0, fails("OVERLOADED", retry_after_ms=300))
        await replicas.complete(ask(max_tokens=1), 5)
        await replicas.complete(ask(max_tokens=1), 5)
        assert len(first.requests) == 1 and len(second.requests) == 2
        await asyncio.sleep(0.35)
        await replicas.complete(ask(max_tokens=1), 5)
        assert len(first.requests) == 2
