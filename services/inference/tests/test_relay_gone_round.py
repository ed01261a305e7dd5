"""Relays that die, freeze, trickle, lie or are busy: whom nobody waits for, and who is waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.weights import arrival, sources
from quartet.weights.payload import CHUNK_BYTES
from quartet_inference import relay
from quartet_inference.engine import ServedWeights

from .relay_fleet import CHUNKS, Fleet, size, tensors, until


async def half_way(fleet: Fleet) -> Any:
    """The manifest of a version of which six replicas in a tree have the first half."""
    await fleet.add(6)
    fleet.trainer.gate.clear()
    fleet.trainer.gate_at = CHUNKS // 2 * CHUNK_BYTES
    full = await fleet.publish(0, tensors(1))
    await until(lambda: fleet.came() >= fleet.trainer.gate_at)
    return full


async def test_a_relay_that_is_killed_costs_the_trainer_only_what_was_missing(fleet: Fleet) -> None:
    full = await half_way(fleet)
    await fleet.replicas[0].kill()
    fleet.trainer.gate.set()
    await fleet.serve(0, fleet.replicas[1:])
    assert fleet.trainer.sent < size(full) + CHUNKS // 2 * CHUNK_BYTES + 3 * CHUNK_BYTES
    # Its children changed places: one of them went on at its offset, the other fetches from that one.
    assert fleet.trainer.streams == 2


async def test_below_a_relay_whose_own_fetch_fails_what_has_come_is_kept(fleet: Fleet) -> None:
    full = await half_way(fleet)
    # Its server lives, and says that there will be no more.
    fleet.replicas[0].task.cancel()
    fleet.trainer.gate.set()
    await fleet.serve(0, fleet.replicas[1:])
    assert fleet.trainer.sent < size(full) + CHUNKS // 2 * CHUNK_BYTES + 3 * CHUNK_BYTES
    assert fleet.trainer.streams == 2 and not any(one.refused for one in fleet.replicas[1:])


async def test_a_relay_that_freezes_is_gone_round_and_not_waited_for_again(fleet: Fleet) -> None:
    await fleet.add(4)

    asked = 0

    async def silence(*_: object) -> None:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()

    fleet.replicas[0].holdings.arrival = silence  # type: ignore[method-assign, assignment]
    full = await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    assert fleet.trainer.sent < 2.1 * size(full), "the frozen one's fetch, and that of one of its children"
    assert asked == 2
    await fleet.publish(1, tensors(2))
    await fleet.serve(1)
    assert asked == 2


async def test_a_relay_that_is_slow_is_gone_round(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SLOW_SECONDS", 1.0)
    monkeypatch.setattr(sources, "SLOW_BYTES_PER_SECOND", 8 * CHUNK_BYTES)
    await fleet.add(2)
    slow = fleet.replicas[0]
    real = slow.holdings.arrival

    async def trickling(*asked: Any) -> Any:
        arrival = await real(*asked)
        chunks = arrival.encoded_chunks

        async def slowly(offset: int) -> AsyncIterator[bytes]:
            async for frame in chunks(offset):
                await asyncio.sleep(0.3)
                yield frame

        arrival.encoded_chunks = slowly
        return arrival

    monkeypatch.setattr(slow.holdings, "arrival", trickling)
    full = await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    assert fleet.trainer.streams == 2
    assert fleet.trainer.sent < 2 * size(full), "what the slow one had sent was not sent again"


async def test_a_relay_that_is_still_busy_is_waited_for(fleet: Fleet) -> None:
    """It lives, and is about to fetch the version: asking the trainer instead would not scale."""
    await fleet.add(3)
    await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    busy = fleet.replicas[0].engine
    busy.staging.clear()
    await fleet.publish(1, tensors(2))
    await fleet.serve(1, fleet.replicas[1:])
    streams = fleet.trainer.streams
    told: list[str] = []
    arrival = fleet.replicas[0].holdings.arrival

    async def answering(*asked: Any) -> Any:
        try:
            return await arrival(*asked)
        except QuartetError as error:
            told.append(error.reason)
            raise

    fleet.replicas[0].holdings.arrival = answering  # type: ignore[method-assign]
    await fleet.publish(2, tensors(3))
    # The two below it are told so for longer than a silent relay is waited for.
    await until(lambda: len(told) >= 2 * 1.2 * sources.SILENT_SECONDS / relay.START_SECONDS)
    assert set(told) == {"NOT_READY"}
    assert fleet.trainer.streams == streams and fleet.replicas[1].version == 1
    busy.staging.set()
    await fleet.serve(2)
    assert fleet.trainer.streams == streams + 1


async def test_a_relay_that_is_always_about_to_begin_is_gone_round(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that wait for each other say just that, for ever; so does one whose way to the trainer is cut. It
    costs its readers that wait once, and not with every version."""
    monkeypatch.setattr(sources, "BEGIN_SECONDS", (0.5, 1.0))
    await fleet.add(3)
    asked = 0

    async def never(*_: object) -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.1)
        raise QuartetError("NOT_READY", "about to")

    monkeypatch.setattr(fleet.replicas[0].holdings, "arrival", never)
    await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    assert fleet.trainer.streams == 2
    before = asked
    await fleet.publish(1, tensors(2))
    await fleet.serve(1)
    assert asked == before > 1


async def test_relays_whose_trainer_still_makes_the_delta_are_waited_for(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sources.py 2, relay.py 2: for a large one longer than a relay that is about to begin is waited for."""
    monkeypatch.setattr(relay, "START_SECONDS", 0.2)
    monkeypatch.setattr(sources, "BEGIN_SECONDS", (1.0, 1.0))
    await fleet.add(4)  # the last one below one that is below the first
    await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    store, made, asked, streams = fleet.trainer.store, threading.Event(), list[Any](), fleet.trainer.streams
    at_hand, road = store.road_at_hand, store.road

    def noted(*of: Any) -> Any:
        asked.append(of)
        return at_hand(*of)

    def making(*of: Any) -> Any:
        made.wait(30)
        return road(*of)

    monkeypatch.setattr(store, "road_at_hand", noted)
    monkeypatch.setattr(store, "road", making)
    await fleet.publish(1, tensors(1, changed=1000))
    await asyncio.sleep(2.5)
    assert len(asked) == 1, "by the first alone"
    made.set()
    await fleet.serve(1)
    assert (len(asked), fleet.trainer.streams) == (1, streams + 1)


@pytest.mark.parametrize("part", [0, CHUNKS // 2])
async def test_promise_5_of_sources_a_relay_that_waits_itself_is_left_for_those_named_meanwhile(
    fleet: Fleet, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first byte and in the middle; one that sends is not left."""
    await fleet.add(2)
    fleet.trainer.gate.clear()
    fleet.trainer.gate_at = part * CHUNK_BYTES
    full = await fleet.publish(0, tensors(1))
    await until(lambda: all(one.holdings._arrival for one in fleet.replicas))
    await until(lambda: fleet.came() >= fleet.trainer.gate_at)
    monkeypatch.setattr(fleet.trainer._relays, "sources", lambda watcher: [])
    await fleet.publish(1, tensors(2))
    # The trainer itself is named now: the second asks it for version 0, from where it is.
    await until(lambda: fleet.trainer.streams == 2, limit_s=5 * arrival.SIGN_SECONDS + 10)
    fleet.trainer.gate.set()
    await fleet.serve(1)
    assert fleet.trainer.sent < 4 * size(full) - part * CHUNK_BYTES + CHUNK_BYTES


async def test_a_version_that_a_relay_passes_over_is_given_up_below_it_too(fleet: Fleet) -> None:
    await fleet.add(2)
    await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    fleet.replicas[0].engine.staging.clear()
    await fleet.publish(1, tensors(2))
    await fleet.serve(1, fleet.replicas[1:])
    await fleet.publish(2, tensors(3))
    await until(lambda: fleet.replicas[1].holdings._fetching == ("r", 2))
    await fleet.publish(3, tensors(4))
    await until(lambda: fleet.replicas[0].holdings._expected == ("r", 3))
    fleet.replicas[0].engine.staging.set()
    await fleet.serve(3)
    assert fleet.trainer.streams == 3, "version 2 was never sent"


async def test_a_relay_that_lies_about_a_version_is_not_believed(fleet: Fleet) -> None:
    await fleet.add(2)
    liar = fleet.replicas[0]
    real = await fleet.publish(0, tensors(1))
    await fleet.serve(0)
    await asyncio.to_thread(liar.holdings.store.publish, "r", 1, tensors(9))
    liar.task.cancel()
    told = await fleet.publish(1, tensors(2))
    assert told.digest != real.digest
    await fleet.serve(1, fleet.replicas[1:])
    assert fleet.replicas[1].engine.served == ServedWeights("r", 1, told.digest)


def test_a_relay_that_trickles_is_slow_and_one_that_says_why_is_waited_for_longer() -> None:
    pace = sources._Pace()
    for _ in range(9):
        pace.note(1.0, 100_000, False)
    with pytest.raises(QuartetError, match="900000 bytes"):
        pace.note(2.0, 0, False)
    starved = sources._Pace()
    for _ in range(50):
        starved.note(1.0, 40, True)
    starved.note(0.1, sources.SLOW_BYTES_PER_SECOND * 10, False)
    assert starved.waited_s == 0.0 and not starved.starved
