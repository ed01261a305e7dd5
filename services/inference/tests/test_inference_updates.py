"""The follower against publishers: what it fetches, and how often, where announcement and contents part."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError
from quartet.inference import UpdateRefusal
from quartet.kit.channel import ClientSecurity, connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.weights import fetch
from quartet.weights.fetched import Fetched
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.sources import Relays
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet.weights.versions import Version
from quartet_inference import refused_runs, relay, updates
from quartet_inference.canary import CanaryWatch
from quartet_inference.engine import EngineInfo, Scored, ScoreRequest, ServedWeights
from quartet_inference.relay import Holdings
from quartet_inference.updates import Adopter, Follower


class Publisher(WeightServicer):
    """The real servicer, which may announce what it does not hold, or refuse to announce."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store)
        self.lies: list[pb.VersionAnnounced] = []
        self.refusals = 0
        self.away = False
        self.truth = asyncio.Event()
        self.fetches = self.manifests = self.watches = 0
        self.watched = 0  # at this time
        self.gate = asyncio.Event()  # of manifests
        self.gate.set()

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchResponse]:
        self.watches += 1
        if self.away:
            raise QuartetError("NOT_READY", "back in a moment")
        if self.refusals:
            self.refusals -= 1
            raise QuartetError("INVALID_REQUEST", "not today")
        for lie in self.lies:
            yield pb.WatchResponse(announced=lie)
        if self.lies:
            await self.truth.wait()
        self.watched += 1
        try:
            async for response in super().Watch(request, context):
                yield response
        finally:
            self.watched -= 1

    async def GetManifest(
        self, request: pb.GetManifestRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetManifestResponse:
        self.manifests += 1
        await self.gate.wait()
        return await super().GetManifest(request, context)

    async def fetch_encoded(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[bytes, None]:
        self.fetches += 1
        async for frame in super().fetch_encoded(request, context):
            yield frame


class Recorder:
    """An engine as far as a follower can see."""

    def __init__(self) -> None:
        self.swaps: list[tuple[bool, ServedWeights]] = []
        self.stages = 0
        self.refuses = ""
        self.out_of_service = ""

    def base_digest(self) -> bytes:
        return b"base"

    def info(self) -> EngineInfo:
        served = self.swaps[-1][1] if self.swaps else None
        info = EngineInfo("", "float32", 9, 1, 9, (), served, 0, 0, 0, len(self.swaps), 0.0, False)
        return replace(info, out_of_service=self.out_of_service)

    async def stage(self, tensors: Mapping[str, Tensor]) -> Any:
        self.stages += 1
        if self.refuses:
            raise QuartetError(self.refuses, "not this one")
        return tensors

    async def swap(self, staged: Any, weights: ServedWeights) -> None:
        self.swaps.append((staged is not None, weights))

    async def score(self, request: ScoreRequest) -> Scored:
        return Scored([0.0] * len(request.tokens[1:]), 0)


def weights(value: int) -> dict[str, Tensor]:
    return {"w": Tensor("F32", (1,), bytes([value, 0, 0, 0]))}


class Following:
    """A follower at work and what it does."""

    def __init__(self) -> None:
        self.store = WeightStore(keep=4)
        self.publisher = Publisher(self.store)
        self.engine = Recorder()
        self.refused: list[UpdateRefusal] = []
        self.caught_up = 0
        self.gone: list[str] = []
        self.elsewhere: set[str] = set()
        self.follower: Any = None

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def _on_caught_up(self, run_id: str) -> None:
        self.caught_up += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await start([Service(SERVICE, add_weight_service, self.publisher)], ServerConfig(), Health())
        async with connect(server.address, bulk=True) as channel:
            engine: Any = self.engine
            adopter = Adopter(engine, CanaryWatch(engine, None, lambda why: None), lambda: None)
            publisher = updates.Publisher(channel, "", Relays(ClientSecurity()))
            self.follower = Follower(
                engine,
                publisher,
                Holdings(2, 1 << 30),
                adopter,
                self.refused.append,
                elsewhere=self.elsewhere.__contains__,
                on_caught_up=self._on_caught_up,
                on_gone=self.gone.append,
            )
            task = asyncio.create_task(self.follower.run())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)


@pytest.fixture
def following(monkeypatch: pytest.MonkeyPatch) -> Following:
    monkeypatch.setattr(updates, "BACKOFF_SECONDS", (0.1, 0.2))
    return Following()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Of each pause, the failures before it, and how long it is."""
    taken: list[tuple[int, float]] = []
    backoff_s = updates.backoff_s

    def pausing(failures: int) -> float:
        taken.append((failures, backoff_s(failures)))
        return taken[-1][1]

    monkeypatch.setattr(updates, "backoff_s", pausing)
    return taken


async def test_promise_5_of_updates_other_contents_than_announced_are_fetched_once_and_asked_for_with_pauses(
    following: Following, pauses: list[tuple[int, float]]
) -> None:
    """The publisher was restarted between its announcement and the fetch."""
    held = following.store.publish("r", 3, weights(1))
    following.publisher.lies = [pb.VersionAnnounced(run_id="r", version=3, digest=b"x" * 16)]
    async with following.running():
        await following.until(lambda: bool(following.engine.swaps))
        await following.until(lambda: following.publisher.manifests >= 5)
        assert following.engine.swaps == [(True, ServedWeights("r", 3, held.digest))]
        assert following.publisher.fetches == 1
        assert following.publisher.manifests <= len(pauses) + 1, "asked for once, and again after each pause"
        assert [failures for failures, _ in pauses] == list(range(1, len(pauses) + 1)), "they grow"
        following.publisher.truth.set()
        # Announcement and contents agree: the follower asks and waits for nothing but the next announcement.
        await following.until(lambda: following.follower._failures == 0)
        settled = following.publisher.manifests
        following.store.publish("r", 4, weights(2))
        await following.until(lambda: following.engine.info().served.version == 4)
        assert following.publisher.manifests == settled + 1
    assert following.publisher.fetches == 2 and following.refused == []


async def test_promise_4_of_updates_every_change_is_followed_and_held_contents_are_not_fetched(
    following: Following,
) -> None:
    """Newer; another run; equal contents under another number; a restored run: a lower number, and the same
    number with other contents."""
    changes = (("a", 7, 1), ("a", 8, 2), ("b", 0, 3), ("b", 1, 3), ("b", 0, 4), ("b", 0, 5), ("b", 1, 5))
    async with following.running():
        for run_id, version, value in changes:
            if value in (4, 5) and version == 0:
                following.store.reopen_run(run_id)
            digest = following.store.publish(run_id, version, weights(value)).digest
            named = ServedWeights(run_id, version, digest)
            await following.until(lambda named=named: following.engine.info().served == named)
    fetched = [fetched for fetched, _ in following.engine.swaps]
    assert fetched == [True, True, True, False, True, True, False]
    assert following.publisher.fetches == 5


async def test_promise_6_of_updates_of_runs_that_are_followed_no_more_nothing_is_held(
    following: Following,
) -> None:
    runs = [f"run-{number}" for number in range(65)]
    async with following.running():
        for number, run_id in enumerate(runs):
            for version in range(2):
                following.store.publish(run_id, version, weights(number * 2 + version))
                served = following.engine.info
                await following.until(
                    lambda served=served, version=version, run_id=run_id: (  # type: ignore[misc]
                        (one := served().served) is not None
                        and (one.run_id, one.version) == (run_id, version)
                    )
                )
            if number:
                following.store.close_run(runs[number - 1])
        assert not following.refused
        store = following.follower._holdings.store
        held = [store.get(runs[-1], version).number for version in range(2)]
        assert held == [0, 1] and following.follower._held.manifest.run_id == runs[-1]
        for gone in runs[:-1]:
            with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
                store.get(gone)


async def test_promises_4_and_6_of_updates_equal_contents_of_another_run_are_held_under_its_name_alone(
    following: Following,
) -> None:
    canary = pb.Canary(token_ids=[1, 2], logprobs=[-1.0])
    async with following.running():
        for run_id in ("a", "b"):
            published = following.store.publish(
                run_id, 0, weights(1), canary=canary if run_id == "b" else None
            )
            named = ServedWeights(run_id, 0, published.digest)
            await following.until(lambda named=named: following.engine.info().served == named)
        await following.until(lambda: following.caught_up == 2)
        holdings = following.follower._holdings
        assert holdings._arrival is None, "nor of the way that it came"
        assert holdings.store.get("b", 0).manifest == published == following.follower._held.manifest
        assert not _holds(holdings.store, "a")
    assert following.publisher.fetches == 1


async def test_promise_4_of_updates_what_is_held_gets_no_name_that_means_other_weights_by_now(
    following: Following,
) -> None:
    """The publisher was restarted between its announcement of equal weights and the question for them."""
    digest = following.store.publish("r", 0, weights(1)).digest
    async with following.running():
        await following.until(lambda: following.caught_up == 1)
        following.publisher.gate.clear()
        following.publisher.manifests = 0
        following.store.publish("r", 1, weights(1))
        await following.until(lambda: following.publisher.manifests == 1)
        following.store.reopen_run("r")
        other = following.store.publish("r", 1, weights(2)).digest
        following.publisher.gate.set()
        await following.until(lambda: following.caught_up == 2)
    served = [ServedWeights("r", 0, digest), ServedWeights("r", 1, other)]
    assert following.engine.swaps == [(True, one) for one in served]


async def test_who_asks_a_follower_for_weights_that_it_had_from_elsewhere_is_told_so_at_once(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """relay.py 2: its engine was started with them, and there is nothing to hand on."""
    monkeypatch.setattr(relay, "START_SECONDS", 600.0)
    own = following.store.publish("r", 0, weights(1)).digest
    monkeypatch.setattr(following.engine, "base_digest", lambda: own)
    async with following.running():
        await following.until(lambda: following.caught_up == 1)
        holdings = following.follower._holdings
        with pytest.raises(QuartetError) as told:
            async with asyncio.timeout(10):
                await holdings.arrival("r", 0, lambda manifest: True)
        assert told.value.reason == "VERSION_UNKNOWN" and told.value.metadata["latest"] == "0"
        # With other contents it is fetched, and held.
        following.store.reopen_run("r")
        following.store.publish("r", 0, weights(2))
        await following.until(lambda: following.caught_up == 2)
        assert await holdings.arrival("r", 0, lambda manifest: True) is None
    assert [fetched for fetched, _ in following.engine.swaps] == [False, True]


async def test_no_event_loop_goes_through_the_tensors_that_are_held(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be 50,000 of them, whether they were fetched or taken over."""
    holding: list[int] = []
    hold = WeightStore.hold

    def noted(store: WeightStore, fetched: Fetched) -> Version:
        holding.append(threading.get_ident())
        return hold(store, fetched)

    monkeypatch.setattr(WeightStore, "hold", noted)
    async with following.running():
        for version in range(2):
            following.store.publish("r", version, weights(1))
            await following.until(lambda version=version: following.caught_up == version + 1)  # type: ignore[misc]
    assert len(holding) == 2 and threading.get_ident() not in holding


async def test_what_is_out_of_service_is_replaced_by_what_was_fetched_anew(following: Following) -> None:
    """What the engine holds may be damaged, and so may what was fetched for it: no name makes it right."""
    following.store.publish("r", 0, weights(1))
    async with following.running():
        await following.until(lambda: following.caught_up == 1)
        following.engine.out_of_service = "the canary died"
        following.store.publish("r", 1, weights(1))
        await following.until(lambda: following.caught_up == 2)
        assert following.publisher.fetches == 2
        following.engine.refuses = "OVERLOADED"
        following.store.publish("r", 2, weights(2))
        await following.until(lambda: len(following.refused) == 2)
        following.engine.refuses = ""
        await following.until(lambda: following.caught_up == 3)
    assert [fetched for fetched, _ in following.engine.swaps] == [True] * 3
    assert following.publisher.fetches == 3 + len(following.refused)


async def test_who_asks_a_follower_for_what_it_passed_over_is_told_what_it_has(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """relay.py 2: it has heard of the newest as soon as that was announced."""
    monkeypatch.setattr(relay, "START_SECONDS", 0.2)
    for version in (1, 3):
        following.store.publish("r", version, weights(version))
    async with following.running():
        await following.until(lambda: bool(following.engine.swaps))
        with pytest.raises(QuartetError) as passed:
            await following.follower._holdings.arrival("r", 1, lambda manifest: True)
    assert passed.value.reason == "VERSION_UNKNOWN" and passed.value.metadata["latest"] == "3"


async def test_who_asks_a_follower_for_what_it_is_fetching_gets_it_whatever_came_since(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """relay.py 2: what is under way is finished."""
    monkeypatch.setattr(relay, "START_SECONDS", 600.0)
    following.publisher.gate.clear()
    following.store.publish("r", 1, weights(1))
    async with following.running():
        await following.until(lambda: following.publisher.manifests == 1)
        holdings = following.follower._holdings
        following.store.publish("r", 2, weights(2))
        await following.until(lambda: holdings._expected == ("r", 2))
        asked = asyncio.create_task(holdings.arrival("r", 1, lambda manifest: manifest.version == 1))
        await asyncio.sleep(0)
        assert not asked.done()
        following.publisher.gate.set()
        assert (await asyncio.wait_for(asked, 10)).manifest.version == 1


async def test_whether_a_run_publishes_adapters_is_asked_once_of_each_run(following: Following) -> None:
    """Relays do not hand these on, and are not waited for."""
    following.store.publish("whole", 0, weights(1))
    following.store.publish("adapter", 0, weights(2), adapter_config="{}")
    async with following.running():
        await following.until(lambda: following.caught_up == 1)
        before, ask = following.publisher.manifests, following.follower._are_adapters
        told = [await ask(ServedWeights(run, 0, b"")) for run in ("whole", "whole", "adapter", "adapter")]
        assert (told, following.publisher.manifests) == ([False, False, True, True], before + 2)


async def test_promise_6_of_updates_refused_runs_make_room_for_each_other(following: Following) -> None:
    async with following.running():
        following.store.publish("served", 0, weights(1))
        await following.until(lambda: len(following.engine.swaps) == 1)
        following.engine.refuses = "INVALID_REQUEST"
        for number in range(3):
            following.store.publish(f"unfit-{number}", 0, weights(number + 2))
            await following.until(lambda number=number: following.engine.stages == number + 2)  # type: ignore[misc]
        store = following.follower._holdings.store
        assert [store.get(run).number for run in ("unfit-1", "unfit-2")] == [0, 0]
        for gone in ("served", "unfit-0"):
            with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
                store.get(gone)
        following.engine.refuses = ""
        following.store.publish("unfit-2", 1, weights(9))
        await following.until(lambda: len(following.engine.swaps) == 2)
        await following.until(lambda: not _holds(store, "unfit-1"))
        assert _holds(store, "unfit-2")


def _holds(store: WeightStore, run_id: str) -> bool:
    try:
        return store.latest(run_id) is not None
    except QuartetError:
        return False


async def test_promise_3_of_updates_a_publisher_that_refuses_to_announce_is_asked_again(
    following: Following,
) -> None:
    """What is permanent at one publisher ends with its restart."""
    following.store.publish("r", 0, weights(1))
    following.publisher.refusals = 2
    async with following.running():
        await following.until(lambda: bool(following.engine.swaps))
    assert [(one.run_id, one.why) for one in following.refused] == [
        ("", "versions are not announced: not today")
    ] * 2


async def test_promise_3_of_updates_what_the_engine_refuses_as_it_is_is_refused_once(
    following: Following,
) -> None:
    """A replica that follows "whoever came last" meets runs that were made for other models."""
    following.engine.refuses = "INVALID_REQUEST"
    following.store.publish("other model", 0, weights(1))
    async with following.running():
        await following.until(lambda: following.publisher.watches == 2)
        # Looked at again, and passed over, before what comes next is taken.
        following.store.publish("other model", 1, weights(2))
        await following.until(lambda: len(following.refused) == 2)
        following.engine.refuses = ""
        following.store.publish("ours", 0, weights(3))
        await following.until(lambda: bool(following.engine.swaps))
    assert (following.engine.stages, following.publisher.fetches) == (3, 3)
    assert [served.run_id for _, served in following.engine.swaps] == ["ours"]
    assert [refused.run_id for refused in following.refused] == ["other model"] * 2


async def test_promise_7_of_updates_of_a_run_that_is_over_nothing_is_refused_until_it_comes_back(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was the only one nothing newer is announced, and an alert would stay until the next run."""
    monkeypatch.setattr(refused_runs, "GONE_SECONDS", 0.05)
    following.engine.refuses = "INVALID_REQUEST"
    following.store.publish("other model", 0, weights(1))
    async with following.running():
        await following.until(lambda: following.publisher.watches == 2)
        asked = following.publisher.manifests
        await following.until(lambda: following.publisher.manifests > asked + 1)
        assert len(following.refused) == 1 and not following.gone
        following.store.close_run("other model")
        await following.until(lambda: bool(following.gone))
        # As a run that was resumed, or whose trainer was restarted.
        following.store.reopen_run("other model")
        following.store.publish("other model", 0, weights(1))
        await following.until(lambda: len(following.refused) == 2)
    assert following.gone == ["other model"] and following.publisher.fetches == 1


async def test_promise_7_of_updates_that_a_run_is_over_is_seen_also_while_another_fails(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failures come sooner than the next look at the first."""
    monkeypatch.setattr(refused_runs, "GONE_SECONDS", 0.5)
    following.engine.refuses = "INVALID_REQUEST"
    following.store.publish("over", 0, weights(1))
    async with following.running():
        await following.until(lambda: len(following.refused) == 1)
        following.engine.refuses = "OVERLOADED"
        following.store.publish("failing", 0, weights(2))
        await following.until(lambda: len(following.refused) == 2)
        following.store.close_run("over")
        await following.until(lambda: bool(following.gone))
    assert following.gone == ["over"]


async def test_promise_7_of_updates_what_is_refused_stays_so_whatever_another_run_does(
    following: Following,
) -> None:
    """As an adapter that comes and goes: nothing of the first is tried, and told, each time."""
    following.engine.refuses = "INVALID_REQUEST"
    following.store.publish("r", 5, weights(1))
    following.elsewhere.add("adapters")
    async with following.running():
        await following.until(lambda: len(following.refused) == 1 and following.publisher.watches == 2)
        for caught_up in (1, 2):
            following.store.reopen_run("adapters")
            following.store.publish("adapters", 0, weights(2))
            await following.until(lambda caught_up=caught_up: following.caught_up == caught_up)  # type: ignore[misc]
            following.store.close_run("adapters")
            target = following.follower._target
            await following.until(
                lambda target=target: target.weights.run_id == "r" and not target.changed.is_set()  # type: ignore[misc]
            )
    assert (following.engine.stages, len(following.refused)) == (1, 1)


async def test_a_follower_has_caught_up_only_when_what_is_announced_is_served(following: Following) -> None:
    """Not by passing over what the engine will never take; and without an update, too."""
    following.store.publish("r", 0, weights(1))
    async with following.running():
        await following.until(lambda: following.caught_up == 1)
        following.engine.refuses = "INVALID_REQUEST"
        following.store.publish("r", 1, weights(2))
        await following.until(lambda: bool(following.refused) and following.publisher.watches == 2)
        assert following.caught_up == 1
        # As a trainer that returned to a saved state.
        following.store.reopen_run("r")
        following.store.publish("r", 0, weights(1))
        await following.until(lambda: following.caught_up == 2)
    assert len(following.engine.swaps) == len(following.refused) == 1


async def test_runs_that_are_followed_elsewhere_are_not_taken_here(following: Following) -> None:
    """As of adapters, beside the run that the replica follows: nothing is left to do for them."""
    following.store.publish("r", 0, weights(1))
    following.elsewhere.add("adapters")
    async with following.running():
        await following.until(lambda: following.caught_up == 1)
        following.store.publish("adapters", 0, weights(2))
        await following.until(lambda: following.caught_up == 2)
    assert [served.run_id for _, served in following.engine.swaps] == ["r"]
    assert following.publisher.fetches == 1


async def test_promise_3_of_updates_what_fails_is_tried_again_after_pauses_that_grow(
    following: Following, pauses: list[tuple[int, float]]
) -> None:
    following.store.publish("r", 0, weights(1))
    async with following.running():
        await following.until(lambda: bool(following.engine.swaps))
        following.engine.refuses = "OVERLOADED"
        following.store.publish("r", 1, weights(2))
        await following.until(lambda: len(following.refused) == 5)
        assert following.engine.info().served.version == 0
        following.engine.refuses = ""
        await following.until(lambda: following.engine.info().served.version == 1)
        following.engine.refuses = "OVERLOADED"
        following.store.publish("r", 2, weights(3))
        await following.until(lambda: len(following.refused) >= 7)
        await following.until(lambda: following.publisher.watched == 1)
    first = [failures for failures, _ in pauses[:5]]
    assert first == [1, 2, 3, 4, 5] and 1 in [failures for failures, _ in pauses[5:]], "and begin anew"


def test_promise_3_of_updates_pauses_are_bounded() -> None:
    """However many failures there were: no pause is longer than the bound, none is nothing."""
    first, last = updates.BACKOFF_SECONDS
    for failures in (1, 2, 5, 100, 10**6):
        drawn = [updates.backoff_s(failures) for _ in range(200)]
        assert first / 2 <= min(drawn) and max(drawn) <= min(last, first * 2 ** min(failures, 20))
    assert max(updates.backoff_s(100) for _ in range(200)) > last / 2


async def test_promise_3_of_updates_nobody_asks_a_publisher_that_is_away_for_weights(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that failed is not tried again before it was announced anew."""
    monkeypatch.setattr(fetch, "BACKOFF_SECONDS", (0.01, 0.02))
    following.engine.refuses = "OVERLOADED"
    following.store.publish("r", 0, weights(1))
    publisher = following.publisher
    async with following.running():
        await following.until(lambda: following.engine.stages >= 1)
        publisher.away = True
        await following.until(lambda: publisher.watches >= 3)
        tried = (following.engine.stages, publisher.manifests, publisher.fetches)
        looked = publisher.watches
        # It looks for the publisher many times, and would have tried as often.
        await following.until(lambda: publisher.watches >= looked + 20)
        assert (following.engine.stages, publisher.manifests, publisher.fetches) == tried
        publisher.away, following.engine.refuses = False, ""
        await following.until(lambda: bool(following.engine.swaps))
