"""WeightStore: bounded, immutable, newest first, safe from threads."""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from quartet.errors import QuartetError
from quartet.weights.delta import Delta, Held, make_delta
from quartet.weights.payload import chunks
from quartet.weights.runs import MAX_RUNS
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet.weights.versions import Version


def weights(value: int) -> dict[str, Tensor]:
    return {"w": Tensor("U8", (4,), bytes([value] * 4))}


def test_only_the_versions_published_last_are_kept() -> None:
    store = WeightStore(keep=2)
    for version in range(5):
        store.publish("r", version, weights(version))
    assert store.get("r", 4).number == 4 and store.get("r", 3).number == 3
    with pytest.raises(QuartetError) as caught:
        store.get("r", 2)
    assert caught.value.reason == "VERSION_UNKNOWN"
    assert caught.value.metadata == {"version": "2", "latest": "4"}


def test_a_version_in_use_outlives_its_eviction_and_is_freed_after_it() -> None:
    store = WeightStore(keep=1)
    array = np.full(4, 1, np.uint8)
    freed = weakref.ref(array)
    store.publish("r", 1, {"w": Tensor("U8", (4,), array.data)})
    del array
    reading = store.get("r", 1)
    store.publish("r", 2, weights(2))
    gc.collect()
    assert freed() is not None
    assert next(chunks(reading.payload)).data.endswith(b"\1\1\1\1")
    del reading
    gc.collect()
    assert freed() is None


def test_publishing_again_changes_nothing_and_other_weights_are_refused() -> None:
    store = WeightStore(keep=2)
    first = store.publish("r", 1, weights(1))
    held = store.get("r", 1)
    assert store.publish("r", 1, weights(1)) == first
    assert store.get("r", 1) is held
    with pytest.raises(QuartetError, match="SEQUENCE_CONFLICT"):
        store.publish("r", 1, weights(9))
    assert store.get("r", 1) is held


def test_a_lower_version_can_be_published_and_fetched_but_is_not_the_latest() -> None:
    store = WeightStore(keep=2)
    for version in (5, 6, 3):
        store.publish("r", version, weights(version))
    assert store.get("r", 3).number == 3
    latest = store.latest("r")
    assert latest is not None and latest.number == 6


def test_latest_without_a_name_is_the_run_opened_last() -> None:
    store = WeightStore(keep=2)
    assert store.latest() is None
    store.publish("a", 3, weights(1))
    store.publish("b", 0, weights(2))
    store.publish("a", 4, weights(3))
    assert store.get("").run_id == "b"
    store.open_run("a")
    assert store.get("").run_id == "a" and store.get("").number == 4
    store.open_run("c")
    assert store.latest() is None
    store.close_run("c")
    store.close_run("c")
    assert store.get("").run_id == "a"


def test_unknown_runs_and_empty_runs_have_typed_errors() -> None:
    store = WeightStore(keep=1)
    for ask in (lambda: store.latest("x"), lambda: store.get("x", 0)):
        with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
            ask()
    store.open_run("x")
    assert store.latest("x") is None
    for version in (None, 0):
        with pytest.raises(QuartetError, match="VERSION_UNKNOWN"):
            store.get("x", version)
    with pytest.raises(QuartetError, match="INVALID_REQUEST"):
        store.publish("", 0, weights(0))
    with pytest.raises(ValueError, match="at least one"):
        WeightStore(keep=0)


def test_the_number_of_runs_is_bounded() -> None:
    store = WeightStore(keep=1)
    for run in range(MAX_RUNS):
        store.open_run(f"r{run}")
    store.open_run("r0")
    with pytest.raises(QuartetError, match="OVERLOADED"):
        store.publish("one more", 0, weights(0))
    store.close_run("r1")
    store.publish("one more", 0, weights(0))


def test_of_runs_that_nobody_opened_the_one_longest_without_a_version_makes_room() -> None:
    store = WeightStore(keep=1, unopened_runs=2)
    store.open_run("mine")
    for opened in ("mine", "yours"):
        store.reopen_run(opened)
    for run, version in (("a", 0), ("b", 0), ("a", 1)):
        store.publish(run, version, weights(version))
    assert store.get("").run_id == "a", "it counts as opened when it gets a version"
    store.publish("c", 0, weights(0))
    with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
        store.get("b")
    assert [store.get(run).number for run in ("a", "c")] == [1, 0]
    store.open_run("a")
    for run in range(2 * MAX_RUNS):
        store.publish(f"r{run}", 0, weights(0))
    assert store.latest("mine") is store.latest("yours") is None, "not even without a version"
    assert [store.get(run).number for run in ("a", f"r{run - 1}", f"r{run}")] == [1, 0, 0]
    store.close_others("a")
    store.close_others("a")
    assert store.get("a").number == 1
    for gone in ("mine", f"r{run}"):
        with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
            store.get(gone)


def test_of_runs_of_adapters_that_nobody_opened_so_many_are_held_beside_the_others() -> None:
    store = WeightStore(keep=1, unopened_runs=1, unopened_adapters=3)
    store.publish("whole", 0, weights(0))
    for run in "abcd":
        store.publish(run, 0, weights(0), adapter_config="{}")
    store.publish("b", 1, weights(1), adapter_config="{}")
    store.publish("e", 0, weights(0), adapter_config="{}")
    assert [store.get(run).number for run in ("whole", "b", "d", "e")] == [0, 1, 0, 0]
    for gone in "ac":
        with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
            store.get(gone)


async def test_what_arrived_is_the_newest_of_every_run_in_the_order_of_arrival() -> None:
    store = WeightStore(keep=2)
    store.open_run("empty")
    for run, version in (("a", 1), ("b", 1), ("a", 2), ("c", 0)):
        store.publish(run, version, weights(version))

    def named(arrived: dict[int, Version]) -> list[tuple[str, int]]:
        return [(one.run_id, one.number) for one in arrived.values()]

    assert await store.wait_arrived(named) == [("b", 1), ("a", 2), ("c", 0)]
    known = await store.wait_arrived(set)

    def others(arrived: dict[int, Version]) -> dict[int, Version] | None:
        return {taken: one for taken, one in arrived.items() if taken not in known} or None

    waiting = asyncio.create_task(store.wait_arrived(others))
    await asyncio.sleep(0)
    await asyncio.to_thread(store.publish, "b", 1, weights(1))  # the same again
    assert named(await waiting) == [("b", 1)]
    assert not store._waiters


async def test_waiters_get_the_newest_of_several_versions_published_from_a_thread() -> None:
    store = WeightStore(keep=2)
    store.open_run("r")
    waiting = asyncio.create_task(store.wait_newer("r", None))
    await asyncio.sleep(0)

    def publish() -> None:
        for version in range(4):
            store.publish("r", version, weights(version))

    publishing = asyncio.to_thread(publish)
    first, _ = await asyncio.gather(waiting, publishing)
    assert (await store.wait_newer("r", first.number - 1)).number == 3
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(store.wait_newer("r", 3), 0.02)  # it has no timer: at once, or when woken
    assert not store._waiters


async def test_a_waiter_that_follows_any_run_hears_of_another_run_with_a_lower_number() -> None:
    store = WeightStore(keep=2)
    store.publish("a", 7, weights(7))
    waiting = asyncio.create_task(store.wait_newer("", 7))
    await asyncio.sleep(0)
    store.publish("b", 0, weights(0))
    newest = await asyncio.wait_for(waiting, 30)
    assert (newest.run_id, newest.number) == ("b", 0)
    # Opened again, the other is followed, with what it has.
    waiting = asyncio.create_task(store.wait_newer("", 0, newest))
    await asyncio.sleep(0)
    store.open_run("a")
    assert (await asyncio.wait_for(waiting, 30)).number == 7


async def test_what_is_held_says_nothing_about_the_first_run() -> None:
    store = WeightStore(keep=1)
    waiting = asyncio.create_task(store.wait_newer("", 7))
    await asyncio.sleep(0)
    store.publish("a", 3, weights(3))
    assert (await asyncio.wait_for(waiting, 30)).number == 3


async def test_closing_a_run_ends_its_waiters() -> None:
    store = WeightStore(keep=1)
    store.publish("a", 1, weights(1))
    waiting = asyncio.create_task(store.wait_newer("a", 1))
    await asyncio.sleep(0)
    store.close_run("a")
    with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
        await asyncio.wait_for(waiting, 30)


async def test_a_run_that_is_closed_and_opened_again_begins_anew_for_its_waiters() -> None:
    store = WeightStore(keep=1)
    store.publish("a", 7, weights(7))
    told = store.get("a", 7)
    waiting = asyncio.create_task(store.wait_newer("a", 7, told))
    await asyncio.sleep(0)
    store.close_run("a")
    store.open_run("a")
    await asyncio.sleep(0)
    assert not waiting.done()
    store.publish("a", 3, weights(3))
    assert (await asyncio.wait_for(waiting, 30)).number == 3
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(store.wait_newer("a", 7), 0.02)


def changing(version: int) -> dict[str, Tensor]:
    """Noise in every version: a delta is about as large as its tensor."""
    values = np.random.default_rng(version).integers(0, 256, 5000, np.uint8)
    steady = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    return {"w": Tensor("U8", (5000,), values.data), "steady": Tensor("U8", (5000,), steady.data)}


def held(store: WeightStore, version: int) -> tuple[int, bytes]:
    return version, bytes(store.get("r", version).manifest.digest)


def test_deltas_are_bounded_in_bytes_the_last_one_excepted() -> None:
    """Invariant 8."""
    store = WeightStore(keep=9, delta_bytes=12_000)
    for version in range(5):
        store.publish("r", version, changing(version))
    for version in range(4):
        store.payload("r", version + 1, held(store, version))
        assert store._deltas.nbytes <= 12_000
    tiny = WeightStore(keep=9, delta_bytes=1)
    tiny.publish("r", 0, changing(0))
    tiny.publish("r", 1, changing(1))
    made = tiny.payload("r", 1, held(tiny, 0))
    assert tiny.payload("r", 1, held(tiny, 0)) is made


def test_deltas_that_no_shorter_road_leads_over_are_forgotten() -> None:
    """deltas.py 4: each is half of a full payload, and two versions are held."""
    store = WeightStore(keep=2)
    store.publish("r", 0, changing(0))
    full, bases = store.get("r", 0).payload.size, {0: held(store, 0)}
    for version in range(1, 8):
        store.publish("r", version, changing(version))
        bases[version] = held(store, version)
        made = store.payload("r", version, bases[version - 1])
        assert full / 3 < made.size < full
        # To the newest, to the one before it, and from there on.
        assert store._deltas.nbytes <= 3 * made.size
    assert store.road("r", None, bases[6]).payload.size < full
    assert store.road("r", 7, bases[5]).payload.size in (made.size, full)
    assert store.road("r", 7, bases[2]).payload.size == full


def test_deltas_go_with_their_run() -> None:
    for forget in (WeightStore.close_run, WeightStore.reopen_run):
        store = WeightStore(keep=9)
        store.publish("r", 0, changing(0))
        store.publish("r", 1, changing(1))
        base = held(store, 0)
        store.payload("r", 1, base)
        assert store._deltas.nbytes > 0
        forget(store, "r")
        assert store._deltas.nbytes == 0
        store.open_run("r")
        store.publish("r", 1, changing(2))
        with pytest.raises(QuartetError, match="VERSION_UNKNOWN"):
            store.payload("r", 1, base)


def test_a_delta_that_saves_nothing_is_not_offered() -> None:
    store = WeightStore(keep=9)
    store.publish("r", 0, {"w": changing(0)["w"]})
    store.publish("r", 1, {"w": changing(1)["w"]})
    assert not store.road("r", 1, held(store, 0)).manifest.HasField("base_version")
    assert store.road("r", 1, held(store, 1)).manifest.base_version == 1


def test_one_delta_is_made_for_all_who_ask_at_once() -> None:
    store = WeightStore(keep=9)
    store.publish("r", 0, changing(0))
    store.publish("r", 1, changing(1))
    base = held(store, 0)
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: store.payload("r", 1, base), range(8)))
    assert all(one is made[0] for one in made)


def test_a_delta_of_a_run_that_was_opened_again_meanwhile_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = WeightStore(keep=9)
    store.publish("r", 0, changing(0))
    store.publish("r", 1, changing(1))

    def late(base: Held, new: Held) -> Delta:
        made = make_delta(base, new)
        store.reopen_run("r")
        return made

    monkeypatch.setattr("quartet.weights.store.make_delta", late)
    assert store.payload("r", 1, held(store, 0)).size
    assert store._deltas.nbytes == 0


def test_another_adapter_configuration_is_another_version() -> None:
    store = WeightStore(keep=9)
    store.publish("r", 0, weights(0), adapter_config='{"r": 8}')
    with pytest.raises(QuartetError, match="SEQUENCE_CONFLICT"):
        store.publish("r", 0, weights(0), adapter_config='{"r": 16}')
    assert store.get("r", 0).manifest.adapter_config == '{"r": 8}'
