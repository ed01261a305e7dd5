"""Follows the trainer's weights: learns of versions, fetches and verifies them, hands them to the engine.

1. The newest announcement is the target; versions that it passes over are never fetched.
2. Generation is disturbed only by the engine's swap: fetching, verifying and checking against the model come
   before.
3. Whatever fails leaves the old version serving, and is tried again, for ever, after a bounded and growing
   pause, and only once the publisher has announced its newest version anew: while it is away nobody asks it
   for weights, and whoever comes back is told its place in the tree. What was fetched and verified is not
   fetched again because the engine refused it.
4. What the publisher announces is the truth, also where its number is not larger: another run, a restored
   run, the same number with other contents. Weights whose digest the engine already holds are taken over
   without being fetched; what was held of them for others is held under the new name.
5. Where fetched contents are not the announced ones they are served, being verified, and the follower waits
   for the announcement that agrees, looking again after the pauses of 3.
6. What is fetched is held for others from the moment that it is verified, and is the base of the next delta.
   Once a version of another run is served, what is held of the run before is forgotten.
7. What was refused of a run is told until the replica has caught up with it, whatever it serves of others, or
   the publisher does not know it any more. Where it comes back with that, it is tried, and told, anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import grpc
import structlog
from quartet.errors import QuartetError
from quartet.inference import UpdateRefusal, refusal
from quartet.kit import tracing
from quartet.kit.backoff import pause_s
from quartet.kit.news import News
from quartet.weights.delta import Held
from quartet.weights.fetch import fetch_version, get_manifest, watch
from quartet.weights.fetched import Fetched
from quartet.weights.sources import Relays, Route
from quartet.weights.transport import Transport

from quartet_inference.adoption import Adopter, weights_of
from quartet_inference.engine import Engine, ServedWeights
from quartet_inference.held import held_digest
from quartet_inference.refused_runs import RefusedRuns
from quartet_inference.relay import Holdings

#: What every failure doubles, and the longest pause.
BACKOFF_SECONDS = (0.1, 5.0)

log = structlog.get_logger()


class ServedNews:
    """Lets requests wait for weights."""

    def __init__(self, engine: Engine) -> None:
        """Watch an engine."""
        self._engine = engine
        self._changed = News()

    def tell(self) -> None:
        """Wake everybody who waits: the engine serves something else."""
        self._changed.tell()

    async def wait_for(self, suits: Callable[[ServedWeights | None], bool], timeout_s: float) -> bool:
        """Wait until the served weights suit; False when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                while not suits(self._engine.info().served):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True)
class Publisher:
    """Whom a replica follows, and how it is known there."""

    channel: grpc.aio.Channel
    run_id: str
    relays: Relays
    #: Where this replica serves what it holds; empty where it does not.
    relay_address: str = ""
    #: Roads to the publisher itself that cost less than any relay.
    transports: tuple[Transport, ...] = ()


class _Target:
    """The newest announcement, or why there is none."""

    def __init__(self) -> None:
        self.weights: ServedWeights | None = None
        self.sources: list[str] = []
        self.error: Exception | None = None
        self.changed = asyncio.Event()


class Follower:
    """Keeps an engine at the newest version of a run."""

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher,
        holdings: Holdings,
        adopter: Adopter,
        on_refused: Callable[[UpdateRefusal], None],
        elsewhere: Callable[[str], bool] = lambda run_id: False,
        on_caught_up: Callable[[str], None] = lambda run_id: None,
        on_away: Callable[[QuartetError | None], None] = lambda why: None,
        on_gone: Callable[[str], None] = lambda run_id: None,
    ) -> None:
        """`on_refused` is called with the reason when an update fails, `on_caught_up` when what was announced
        of a run is served or another's to take, `on_away` as `watch` says, `on_gone` when the publisher does
        not know a run any more of which something was refused.

        Of runs that are followed `elsewhere` only the first version is taken here.
        """
        self._elsewhere = elsewhere
        self._engine = engine
        self._publisher = publisher
        self._holdings = holdings
        self._adopter = adopter
        self._on_refused, self._on_caught_up, self._on_away = on_refused, on_caught_up, on_away
        self._refused = RefusedRuns(publisher.channel, on_gone, self.look_again)
        #: What was fetched last: the base of the next delta, as long as the engine serves it.
        self._held: Fetched | None = None
        #: A run, and whether it publishes adapters.
        self._kind = ("", False)
        #: Of the fetch by relays that is under way: of which run, and its way.
        self._under_way: tuple[str, Route] | None = None
        self._failures = 0
        self._target = _Target()

    def look_again(self) -> None:
        """What was announced last may be taken here now: it is followed elsewhere no more, or is back."""
        if self._target.weights is not None:
            self._target.changed.set()

    async def run(self) -> None:
        """Follow until cancelled."""
        looking = asyncio.create_task(self._refused.look(), name="look-for-refused-runs")
        try:
            while True:
                target = self._target = _Target()
                watching = asyncio.create_task(self._watch(target), name="watch-weights")
                try:
                    await self._keep_up(target)
                except QuartetError as error:
                    log.warning("no update", why=str(error), failures=self._failures)
                    run_id = error.metadata.get("run_id", "")
                    self._on_refused(refusal(error.message, run_id))
                    self._refused.blame(run_id)
                finally:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
                self._failures += 1
                await asyncio.sleep(backoff_s(self._failures))
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _watch(self, target: _Target) -> None:
        publisher = self._publisher
        # No held version: what the publisher has is told first, and compared by digest.
        announcements = watch(
            publisher.channel, publisher.run_id, None, publisher.relay_address, self._on_away
        )
        try:
            async with aclosing(announcements):
                async for news in announcements:
                    target.weights = ServedWeights(news.run_id, int(news.version), bytes(news.digest))
                    target.sources = list(news.sources)
                    self._go_by(target)
                    self._holdings.expect(news.run_id, int(news.version))
                    target.changed.set()
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for announcements
            target.error = error
            target.changed.set()

    async def _keep_up(self, target: _Target) -> None:
        """Adopt what is announced, until something fails."""
        while True:
            await target.changed.wait()
            target.changed.clear()
            if isinstance(target.error, QuartetError):
                # What no waiting mends at this publisher, the one that is started after it may mend.
                raise QuartetError(target.error.reason, f"versions are not announced: {target.error.message}")
            if target.error is not None:
                raise target.error
            wanted = target.weights
            assert wanted is not None
            taken = wanted in (self._engine.info().served, self._refused.weights)
            if not taken and not self._elsewhere(wanted.run_id):
                try:
                    with tracing.span("weights", root=True, run_id=wanted.run_id, version=wanted.version):
                        adopted = await self._adopt(wanted, target)
                except QuartetError as error:
                    message = f"version {wanted.version} could not be taken: {error.message}"
                    raise QuartetError(error.reason, message, run_id=wanted.run_id) from error
                self._forget_all_but(adopted.run_id)
                if adopted != wanted:
                    # No fault of this version, and nothing to refuse: only to be looked at again.
                    log.info("publisher holds other contents than announced", version=wanted.version)
                    self._failures += 1
                    await asyncio.sleep(backoff_s(self._failures))
                    target.changed.set()
                    continue
            self._failures = 0
            if wanted == self._engine.info().served or self._elsewhere(wanted.run_id):
                self._refused.absolve(wanted.run_id)
                self._on_caught_up(wanted.run_id)

    def _forget_all_but(self, run_id: str) -> None:
        self._holdings.store.close_others(run_id)
        if self._held is not None and self._held.manifest.run_id != run_id:
            self._held = None

    async def _adopt(self, target: ServedWeights, newest: _Target) -> ServedWeights:
        """Serve what the publisher holds under the target's number, and return it.

        Its digest is the manifest's: the announcement may be older than the publisher's restart.
        """
        info = self._engine.info()
        if info.served is not None and _same_number(info.served, target):
            # The number is served, with other contents: are they still there, before a payload is moved?
            manifest = await get_manifest(self._publisher.channel, target.run_id, target.version)
            target = replace(target, digest=bytes(manifest.digest))
            if target == info.served:
                return target
        if target.digest == held_digest(info.served, self._engine.base_digest()) and not info.out_of_service:
            held = self._served_of_store()
            if held is None:
                # The engine had them from elsewhere: there is nothing to hand on.
                await self._adopter.rename(target)
                self._holdings.has_no_bytes_of(target.run_id, target.version)
                return target
            manifest = await get_manifest(self._publisher.channel, target.run_id, target.version)
            if manifest.digest == target.digest:
                await self._hold(Fetched(manifest, dict(held.tensors)))
                self._holdings.settled()
                await self._adopter.rename(target)
                return target
            target = replace(target, digest=bytes(manifest.digest))
        fetched = self._held
        if fetched is None or weights_of(fetched.manifest) != target or info.out_of_service:
            fetched = await self._fetch(target, newest)
        # Otherwise it was fetched already, but the engine did not take it.
        try:
            return await self._adopter.adopt(fetched)
        except QuartetError as error:
            if error.reason == "INVALID_REQUEST":
                self._refused.weights = weights_of(fetched.manifest)
            raise

    async def _fetch(self, target: ServedWeights, newest: _Target) -> Fetched:
        publisher, served = self._publisher, self._engine.info().served
        held = self._held
        follows = (
            held
            and served
            and held.manifest.digest == served.digest
            and held.manifest.run_id == target.run_id
        )
        direct = publisher.transports or not newest.sources or await self._are_adapters(target)
        sources = [] if direct else newest.sources
        route = await publisher.relays.route(publisher.channel, sources, target.digest)
        self._holdings.fetching(target.run_id, target.version, lambda: route.prepares_s)
        self._under_way = None if direct else (target.run_id, route)
        self._go_by(newest)  # it may have come since
        try:
            fetched = await fetch_version(
                route,
                target.run_id,
                target.version,
                held if follows else None,
                on_arrival=self._holdings.arriving,
                transports=publisher.transports,
            )
            await self._hold(fetched)
        except QuartetError as error:
            route.blame(error)
            raise
        finally:
            self._under_way = None
            self._holdings.settled()
        return fetched

    def _go_by(self, newest: _Target) -> None:
        """The publisher's tree is what it says now, also for an earlier version of the run."""
        if self._under_way and newest.weights and newest.weights.run_id == self._under_way[0]:
            self._under_way[1].go_by(newest.sources)

    async def _hold(self, fetched: Fetched) -> None:
        """For others, and as the base of the next delta."""
        # It goes through the tensors, of which a mixture may have ten thousands.
        await asyncio.to_thread(self._holdings.store.hold, fetched)
        self._held = fetched

    def _served_of_store(self) -> Held | None:
        """What is held for others of the version that is served."""
        served = self._engine.info().served
        try:
            held = self._holdings.store.get(served.run_id, served.version) if served else None
        except QuartetError:
            return None
        return held if held and served and held.manifest.digest == served.digest else None

    async def _are_adapters(self, target: ServedWeights) -> bool:
        """Whether its run publishes adapters: relays hear of these, and do not fetch them."""
        if self._kind[0] != target.run_id:
            manifest = await get_manifest(self._publisher.channel, target.run_id, target.version)
            self._kind = (target.run_id, bool(manifest.adapter_config))
        return self._kind[1]


def _same_number(one: ServedWeights, other: ServedWeights) -> bool:
    return (one.run_id, one.version) == (other.run_id, other.version)


def backoff_s(failures: int) -> float:
    """How long to wait after so many failures in a row."""
    return pause_s(failures, *BACKOFF_SECONDS)
