"""Follows the trainer's weights: learns of versions, fetches and verifies them, hands them to the engine.

1. The newest announcement is the target; versions that it passes over are never fetched.
2. Generation is disturbed only by the engine's swap: fetching, verifying and checking against the model come
   before.
3. Whatever fails leaves the old version serving, and is tried again, for ever, after a bounded and growing
   pause.
4. What the publisher announces is the truth, also where its number is not larger: another run, a restored
   run, the same number with other contents. Weights whose digest the engine already holds are taken over
   without being fetched.
5. Where fetched contents are not the announced ones they are served, being verified, and the follower waits
   for the announcement that agrees, looking again after the pauses of 3.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import grpc
import structlog
from quartet.errors import QuartetError
from quartet.weights.fetch import fetch_version, get_manifest, watch

from quartet_inference.engine import Engine, ServedWeights

#: Full jitter below a bound that doubles from the first to the second.
BACKOFF_SECONDS = (0.1, 5.0)

log = structlog.get_logger()


class ServedNews:
    """Lets requests wait for weights."""

    def __init__(self, engine: Engine) -> None:
        """Watch an engine."""
        self._engine = engine
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """Wake everybody who waits: the engine serves something else."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for(self, suits: Callable[[ServedWeights | None], bool], timeout_s: float) -> bool:
        """Wait until the served weights suit; False when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                while not suits(self._engine.info().served):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


class Follower:
    """Keeps an engine at the newest version of a run."""

    def __init__(
        self,
        engine: Engine,
        channel: grpc.aio.Channel,
        run_id: str,
        on_served: Callable[[], None],
        on_refused: Callable[[str], None],
    ) -> None:
        """`on_served` is called after every change, `on_refused` with the reason when one fails."""
        self._engine = engine
        self._channel = channel
        self._run_id = run_id
        self._on_served = on_served
        self._on_refused = on_refused
        self._target: ServedWeights | None = None
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Follow until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(), name="watch-weights")
            tasks.create_task(self._fetch(), name="fetch-weights")

    async def _watch(self) -> None:
        failures = 0
        while True:
            # No held version: what the publisher has is told first, and compared by digest.
            try:
                async with aclosing(watch(self._channel, self._run_id, None)) as announcements:
                    async for news in announcements:
                        failures = 0
                        self._target = ServedWeights(news.run_id, int(news.version), bytes(news.digest))
                        self._news.set()
            except QuartetError as error:
                # What no waiting mends at this publisher, the one that is started after it may mend.
                failures += 1
                log.warning("weights not announced", why=str(error), failures=failures)
                self._on_refused(f"versions are not announced: {error.message}")
            await asyncio.sleep(_backoff_s(failures))

    async def _fetch(self) -> None:
        failures = 0
        while True:
            await self._news.wait()
            target = self._target
            assert target is not None
            if target == self._engine.info().served:
                self._news.clear()
                failures = 0
                continue
            try:
                if await self._adopt(target) == target:
                    continue
                log.info("publisher holds other contents than announced", version=target.version)
            except QuartetError as error:
                log.warning("version refused", version=target.version, run_id=target.run_id, why=str(error))
                self._on_refused(f"version {target.version} could not be taken: {error.message}")
            failures += 1
            await asyncio.sleep(_backoff_s(failures))

    async def _adopt(self, target: ServedWeights) -> ServedWeights:
        """Serve what the publisher holds under the target's number, and return it.

        Its digest is the manifest's: the announcement may be older than the publisher's restart.
        """
        served = self._engine.info().served
        held = self._engine.base_digest() if served is None else served.digest
        if served is not None and (served.run_id, served.version) == (target.run_id, target.version):
            # The number is served, with other contents: are they still there, before a payload is moved?
            manifest = await get_manifest(self._channel, target.run_id, target.version)
            target = replace(target, digest=bytes(manifest.digest))
            if target == served:
                return served
        if target.digest == held:
            await self._engine.swap(None, target)
        else:
            fetched = await fetch_version(self._channel, target.run_id, target.version)
            staged = await self._engine.stage(fetched.tensors)
            target = replace(target, digest=bytes(fetched.manifest.digest))
            await self._engine.swap(staged, target)
        log.info(
            "serving version",
            run_id=target.run_id,
            version=target.version,
            pause_ms=self._engine.info().last_update_pause_ms,
        )
        self._on_served()
        return target


def _backoff_s(failures: int) -> float:
    first, last = BACKOFF_SECONDS
    return random.uniform(first / 2, min(last, first * 2 ** min(failures, 10)))
