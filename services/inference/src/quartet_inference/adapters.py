"""The runs whose adapters this replica serves: each followed on its own, replaced by every newer version.

1. An adapter is served from its first verified version on, and followed until it is unloaded: LoadAdapter, a
   request that names its run, or the run that the replica follows anyway begin it. It outlives its run, until
   another needs the place.
2. An adapter is served upon the model of the replica's own folder, and upon nothing else. Where the run that
   the replica follows publishes adapters, that model replaces other weights; where it publishes whole models,
   adapters are refused, and those that are served go with the folder's model. A run that publishes a whole
   model where its adapter was followed is unloaded here, and may be taken as what it is.
3. An adapter whose canary dies is unloaded: its requests fail with NOT_READY, and whoever loads it is told
   (verdicts.py). Other runs are not touched.
4. Whatever fails leaves the version that is served, and is told; fetching is tried again as for a model.
5. What is taken is followed and what is unloaded has left, although the caller is gone meanwhile: neither is
   ever done by half. What is being loaded is loaded (loads.py), unless it is unloaded before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import structlog
from quartet.errors import QuartetError
from quartet.inference import UpdateRefusal
from quartet.kit.shielded import shielded
from quartet.v1.weights_pb2 import WeightManifest
from quartet.weights.fetch import fetch_version, get_manifest
from quartet.weights.fetched import Fetched
from quartet.weights.versions import Version

from quartet_inference.adapter import AdapterAdopter, AdapterView, no_adapter, of_run
from quartet_inference.adapter_base import AdapterBase, OnBase
from quartet_inference.canary import CanaryWatch
from quartet_inference.engine import Engine, ServedWeights, adapter_gone
from quartet_inference.loads import Loads
from quartet_inference.lookup import Lookup
from quartet_inference.own_model import OwnModel
from quartet_inference.relay import Holdings
from quartet_inference.updates import Follower, Publisher, ServedNews
from quartet_inference.verdicts import Verdicts

#: Of a run's adapter, for whoever fetches it next here: the base of a delta.
KEPT_VERSIONS = 1
#: Deltas that nobody is handed.
DELTA_BYTES = 0
#: What LoadAdapter waits for the adapter's follower, which is at work already.
LOAD_SECONDS = 60.0
#: And for its canary, which the engine scores before all else, once it has a place and is not paused.
CANARY_SECONDS = 20.0
#: Where adapters come from whoever has them.
PUSH_IT = "push the adapter (WeightService.Push): it is served from then on, without LoadAdapter"
#: Why an adapter is not loaded that waiting does not mend.
REFUSED = frozenset({"INVALID_REQUEST", "OVERLOADED", "CHECKSUM_MISMATCH"})

T = TypeVar("T")

log = structlog.get_logger()


@dataclass
class _Followed:
    adopter: AdapterAdopter
    canaries: CanaryWatch
    task: asyncio.Task[None] | None = None


class Adapters:
    """Adapters by run. For one event loop."""

    def __init__(
        self,
        engine: Engine,
        news: ServedNews,
        own: OwnModel,
        *,
        on_demand: bool,
        canary_tolerance: float | None = None,
        accept_push: bool = False,
    ) -> None:
        """Serve them upon the replica's `own` model; `accept_push`: some may be pushed."""
        self._accept_push = accept_push
        self._engine, self._news, self._folder = engine, news, own.folder
        self._on_demand, self._tolerance = on_demand, canary_tolerance
        self.verdicts = Verdicts()
        self._base = AdapterBase(engine, news, own, self._whole)
        self._lookup, self._loads = Lookup(self._look_for, news.tell), Loads()
        self._publisher: Publisher | None = None
        self._on_whole: Callable[[], None] = lambda: None
        self._followed: dict[str, _Followed] = {}
        self._changing = asyncio.Lock()  # of those who begin to serve and follow an adapter, or end it
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(
        self, publisher: Publisher | None, on_base: OnBase, on_whole: Callable[[], None] = lambda: None
    ) -> None:
        """Follow runs at this publisher; `on_base` is told when the folder's own model begins to serve, and
        `on_whole` when a run is followed here no more because it publishes whole models."""
        self._publisher = publisher
        self._base.on_serving = on_base
        self._on_whole = on_whole

    def follows(self, run_id: str) -> bool:
        """Whether a run's adapter is served, and newer versions come of themselves."""
        held = self._followed.get(run_id)
        return held is not None and held.task is not None and of_run(self._engine.info(), run_id) is not None

    async def load(self, run_id: str) -> ServedWeights:
        """Serve the newest version of a run's adapter, whose canary lives, and follow it.

        Errors: RUN_UNKNOWN, INVALID_REQUEST, OVERLOADED, CHECKSUM_MISMATCH, NOT_READY, DEADLINE.
        """
        publisher = self._publisher
        if publisher is None:
            raise QuartetError(
                "INVALID_REQUEST",
                "this replica follows no trainer (weights_address is empty), so no adapter can be fetched"
                + (f"; {PUSH_IT}" if self._accept_push else ""),
                field="run_id",
                value=run_id,
                remedy=PUSH_IT if self._accept_push else "set weights_address",
            )
        newest = await get_manifest(publisher.channel, run_id)
        if not newest.adapter_config:
            raise no_adapter(newest.run_id)
        load = partial(self._load, publisher, newest)
        try:
            return await self._loads.reach(newest.run_id, int(newest.version), load)
        except QuartetError as error:
            if error.reason in REFUSED:
                self.verdicts.refused(newest.run_id, f"its adapter could not be loaded: {error.message}")
            raise

    async def _load(self, publisher: Publisher, newest: WeightManifest) -> ServedWeights:
        await self._base.ready(publisher)
        if not self.follows(newest.run_id):
            taken = await self._take(await fetch_version(publisher.channel, newest.run_id, None, None))
            if taken.version >= newest.version:
                return await self._scored(newest.run_id)

        def arrived(_: ServedWeights | None) -> bool:
            served = of_run(self._engine.info(), newest.run_id)
            return served is not None and served.version >= newest.version

        if not arrived(None) and not await self._news.wait_for(arrived, LOAD_SECONDS):
            raise QuartetError("DEADLINE", f"version {newest.version} did not arrive", waited_for="adapter")
        return await self._scored(newest.run_id)

    async def _scored(self, run_id: str) -> ServedWeights:
        """What is served of a run, once its canary lives. Errors: NOT_READY, DEADLINE."""
        followed = self._followed.get(run_id)
        if followed is not None:
            try:
                async with asyncio.timeout(CANARY_SECONDS):
                    await followed.canaries.scored()
            except TimeoutError:
                raise QuartetError(
                    "DEADLINE",
                    f"the adapter's canary was not scored within {CANARY_SECONDS:g} s; Resume the replica "
                    "where it is paused, or wait",
                    waited_for="canary",
                ) from None
        served = of_run(self._engine.info(), run_id)
        if run_id in self.verdicts.dead or served is None:
            raise QuartetError("NOT_READY", self.verdicts.dead.get(run_id) or adapter_gone(run_id).message)
        if not self.verdicts.living(run_id):
            raise QuartetError(
                "DEADLINE",
                "the adapter's canary could not be scored, the log says why; unload it and load it again",
                waited_for="canary",
            )
        return served

    async def verdict(self, run_id: str) -> str:
        """Why a run's adapter is dead, once the canary of what is loaded was scored; empty where it lives."""
        followed = self._followed.get(run_id)
        if followed is not None:
            await followed.canaries.scored()
        return self.verdicts.dead.get(run_id, "")

    def served(self) -> tuple[ServedWeights, ...]:
        """The adapters of which a canary lived, by run."""
        return tuple(one for one in self._engine.info().adapters if self.verdicts.living(one.run_id))

    async def adopt(self, version: Version | Fetched) -> ServedWeights:
        """Serve a verified version of the run that the replica follows; other base weights leave the engine.

        Errors: those of `load`.
        """
        await self._base.make_way(version)
        return await self._take(version)

    async def _take(self, version: Version | Fetched) -> ServedWeights:
        while True:
            try:
                return await self._whole(self._begin(version))
            except QuartetError as error:
                if error.reason != "OVERLOADED" or not await self._unload_ended(but=version.manifest.run_id):
                    raise

    async def _begin(self, version: Version | Fetched) -> ServedWeights:
        """Serve a version, and follow its run."""
        run_id = str(version.manifest.run_id)
        async with self._changing:
            served = of_run(self._engine.info(), run_id)
            if served is not None and self.follows(run_id):
                return served  # of two that take a run's first version at once, one follows it
            if served is None:
                self.verdicts.ended(run_id)
            followed = self._followed.get(run_id) or self._make(run_id)
            weights = await followed.adopter.adopt(version)
            self._followed[run_id] = followed
            if followed.task is None and self._publisher is not None:
                followed.task = self._follow(run_id, self._publisher, followed.adopter)
            return weights

    def _follow(self, run_id: str, publisher: Publisher, adopter: AdapterAdopter) -> asyncio.Task[None]:
        # Adapters are small: they are fetched from the publisher and not handed on.
        publisher = replace(publisher, run_id=run_id, relay_address="")
        follower = Follower(
            cast(Engine, AdapterView(self._engine, run_id)),
            publisher,
            Holdings(KEPT_VERSIONS, DELTA_BYTES),
            adopter,
            lambda why: self._refused(run_id, why),
            on_caught_up=self.verdicts.caught_up,
            on_gone=self.verdicts.caught_up,
        )
        task = asyncio.create_task(follower.run(), name=f"follow-adapter-{run_id}")
        task.add_done_callback(lambda task: self._ended(run_id, task))
        return task

    async def _unload_ended(self, but: str) -> bool:
        """Unload the oldest adapter whose run the trainer has not open, if there is another than this."""
        publisher = self._publisher
        if publisher is None:
            return False
        for run_id in [one for one in self._followed if one != but]:
            try:
                await get_manifest(publisher.channel, run_id)
            except QuartetError as error:
                if error.reason == "VERSION_UNKNOWN":
                    continue  # it is open
                if error.reason != "RUN_UNKNOWN":
                    return False
                log.info("adapter of an ended run makes room", run_id=run_id)
                await self._leave(run_id)
                return True
        return False

    async def unload(self, run_id: str) -> None:
        """Serve, follow and load a run's adapter no more. Idempotent."""
        self._loads.give_up(run_id)
        await self._leave(run_id)

    async def _leave(self, run_id: str, then: Callable[[], None] = lambda: None) -> None:
        self.verdicts.forget(run_id)
        await self._whole(self._end(run_id, adapter_gone(run_id)))
        then()

    def base_changed(self) -> None:
        """Other weights are served: adapters that left with those before are followed no more."""
        if not self._base.serves():
            for run_id in self._followed:
                self._spawn(self._leave(run_id))

    def want(self, run_id: str) -> None:
        """A request names a run that is not served: look for it, and for its adapter, in the background."""
        if self._publisher is not None and not self.follows(run_id):
            self._lookup.begin(run_id)

    def dead(self, run_id: str) -> str:
        """Why what was loaded last of a run's adapter is not served; empty where one may be."""
        return "" if self.verdicts.living(run_id) else self.verdicts.dead.get(run_id, "")

    def denied(self, run_id: str, since: float) -> bool:
        """Whether the publisher, asked at `since` or later, had no run of this name."""
        return self._lookup.denied(run_id, since)

    async def _look_for(self, run_id: str) -> None:
        """Errors: those of `load`; where nothing is served on demand, those of its question for the run."""
        if self._on_demand:
            await self.load(run_id)
        else:
            assert self._publisher is not None
            await get_manifest(self._publisher.channel, run_id)

    async def close(self) -> None:
        """Follow, look for and load nothing any more."""
        await self._lookup.close()
        await self._loads.close()
        tasks = [one.task for one in self._followed.values() if one.task is not None]
        for followed in self._followed.values():
            followed.canaries.close()
        for task in (*tasks, *self._tasks):
            task.cancel()
        await asyncio.gather(*tasks, *self._tasks, return_exceptions=True)

    def _make(self, run_id: str) -> _Followed:
        def verdict(why: str) -> None:
            if not why:
                self.verdicts.lives(run_id)
                return self._news.tell()
            told = f"adapter unloaded: {why}: {adopter.if_dead}"
            self.verdicts.died(run_id, told)
            self._spawn(self._end(run_id, QuartetError("NOT_READY", told)))

        def whole() -> None:
            self._spawn(self._leave(run_id, self._on_whole))  # its models are for whoever follows those

        canaries = CanaryWatch(self._engine, self._tolerance, verdict)
        adopter = AdapterAdopter(self._engine, canaries, self._news.tell, self._folder, whole)
        return _Followed(adopter, canaries)

    def _refused(self, run_id: str, why: UpdateRefusal) -> None:
        """A newer version was not taken: where the base weights have left, none will be."""
        if not self._base.serves():
            self._spawn(self._leave(run_id))
        elif self.follows(run_id):
            self.verdicts.fell_behind(run_id, why)

    def _ended(self, run_id: str, task: asyncio.Task[None]) -> None:
        """A follower that failed: an old version is never served for ever."""
        if not task.cancelled():
            log.error("adapter follower ended", run_id=run_id, why=repr(task.exception()))
            self._spawn(self._end(run_id, QuartetError("NOT_READY", "the adapter is followed no more")))

    async def _end(self, run_id: str, why: QuartetError) -> None:
        async with self._changing:
            followed = self._followed.pop(run_id, None)
            if followed is not None:
                followed.canaries.close()
                if followed.task is not None:
                    followed.task.cancel()
                    await asyncio.gather(followed.task, return_exceptions=True)
            await self._engine.drop_adapter(run_id, why)
            self.verdicts.ended(run_id)
        self._news.tell()

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that goes on to its end when its caller is cancelled."""
        return await shielded(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
