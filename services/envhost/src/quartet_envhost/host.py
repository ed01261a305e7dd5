"""The environments of this host: which are hosted, which are loaded, what runs.

1. Every member of an accepted request ends exactly once (active_request.py).
2. At most `max_in_flight` members are accepted and unfinished; more are refused whole as OVERLOADED. A
   request that has more by itself is INVALID_REQUEST; DescribeEnvironment tells how many it may have.
3. Equal (id, args) share their workers. At most `max_loaded` pairs have workers; one that nobody loads, asks
   or runs makes room, never another.
4. While `busy`, progress is told at least every `stall_limit_s`: no request waits longer for the end of an
   attempt, or of a worker's start, than those may take. One that waits for its reader is not busy.
5. Told to end, it refuses new requests and lets those under way end, for as long as the service's
   `flush_seconds` allow.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Final

import structlog
from quartet.errors import QuartetError, refused
from quartet.run.hosted import MAX_GROUP
from quartet.v1 import envhost_service_pb2, rollout_pb2

from quartet_envhost import args_json
from quartet_envhost.active_request import ActiveRequest, Frame, Run
from quartet_envhost.config import EnvHostConfig, PreloadConfig, canonical_id, is_built_in, wanted_version
from quartet_envhost.dialogue import Dialogue
from quartet_envhost.gauges import Glance, UnderWay
from quartet_envhost.pool import WorkerPool
from quartet_envhost.tally import tally
from quartet_envhost.templates import Templates, possible
from quartet_envhost.together import Together

# Between one start or attempt and the next: a worker's end (process.py), its backoff (keeping.py), a member's
# (pool.py).
BETWEEN_S: Final = 30.0

log = structlog.get_logger()


class EnvironmentHost:
    """Pools of workers, and the requests they serve."""

    def __init__(self, config: EnvHostConfig, progress: Callable[[], None] = lambda: None) -> None:
        """Start nothing."""
        self._config = config
        self.max_in_flight = config.max_in_flight
        self._progress = progress
        self._pools: dict[tuple[str, str, str], WorkerPool] = {}
        self._templates = _templates(config)
        self._active: dict[str, ActiveRequest] = {}
        self._in_flight = 0
        self._draining = False
        self._request_ended = asyncio.Event()
        self._changing = asyncio.Lock()

    @property
    def in_flight(self) -> int:
        """Members accepted and unfinished."""
        return self._in_flight

    def busy(self) -> bool:
        """Whether something is under way that has to move."""
        return any(active.busy for active in self._active.values())

    def stall_limit_s(self) -> float:
        """How long what is under way may take until it tells progress."""
        attempt_s = max((active.attempt_s for active in self._active.values()), default=0.0)
        return self._config.load_timeout_seconds + attempt_s + BETWEEN_S

    def glances(self) -> list[Glance]:
        """Of the environments that are loaded, or could not be; to read from any thread."""
        return [
            Glance(
                canonical_id(pool.env_id),
                sum(worker.alive for worker in list(pool.workers)),
                pool.places,
                pool.failed,
            )
            for pool in list(self._pools.values())
            if pool.told.api or pool.failed
        ]

    def under_way(self) -> list[UnderWay]:
        """Of the requests; to read from any thread."""
        return [
            UnderWay(canonical_id(one.request.environment.id), one.unfinished, one.started)
            for one in list(self._active.values())
        ]

    def hosted(self) -> list[envhost_service_pb2.EnvironmentInfo]:
        """The configured environments, and the loaded ones."""
        infos: dict[str, envhost_service_pb2.EnvironmentInfo] = {}
        for env_id in [*self._config.environments, *(pool.env_id for pool in self._pools.values())]:
            info = infos.setdefault(canonical_id(env_id), envhost_service_pb2.EnvironmentInfo(id=env_id))
            pools = [
                pool for pool in self._pools.values() if canonical_id(pool.env_id) == canonical_id(env_id)
            ]
            info.workers = sum(len(pool.workers) for pool in pools)
            info.api = next((pool.told.api for pool in pools if pool.told.api), "")
        return list(infos.values())

    async def preload(self) -> None:
        """Load what the configuration says; what does not load is said to whoever asks for it."""

        async def load(one: PreloadConfig) -> None:
            ref = envhost_service_pb2.EnvironmentRef(id=one.id, args_json=json.dumps(one.args))
            try:
                await self.describe(ref)
            except QuartetError as error:
                log.warning("environment not preloaded", env_id=one.id, why=error.message)

        await asyncio.gather(*map(load, self._config.preload))

    async def describe(self, ref: envhost_service_pb2.EnvironmentRef) -> envhost_service_pb2.EnvironmentInfo:
        """Load an environment and describe it."""
        pool = await self._pool(ref)
        with pool.used():
            info = await pool.open()
        info.max_members = min(MAX_GROUP, self.max_in_flight)
        if info.group_scoring:
            info.max_members = min(info.max_members, pool.places_of_a_worker)
        return info

    async def tasks(
        self, request: envhost_service_pb2.GetTasksRequest
    ) -> envhost_service_pb2.GetTasksResponse:
        """Examples of an environment."""
        pool = await self._pool(request.environment)
        with pool.used():
            return await pool.tasks(request)

    async def run(
        self, request: envhost_service_pb2.RunRolloutsRequest
    ) -> AsyncGenerator[rollout_pb2.Rollout, None]:
        """The members of a request, each as it ends. Closing the iterator cancels what is left."""
        if self._config.interact_only:
            raise QuartetError(
                "INVALID_REQUEST", "this host is interact_only: it knows no inference; use Interact"
            )
        async with aclosing(self._run(request, None)) as frames:
            async for frame in frames:
                assert isinstance(frame, rollout_pb2.Rollout), "nobody asks questions"
                yield frame

    async def interact(
        self, request: envhost_service_pb2.RunRolloutsRequest, dialogue: Dialogue
    ) -> AsyncGenerator[Frame, None]:
        """As `run`, with the questions that `dialogue` has to answer between the rollouts."""
        async with aclosing(self._run(request, dialogue)) as frames:
            async for frame in frames:
                yield frame

    async def _run(
        self, request: envhost_service_pb2.RunRolloutsRequest, dialogue: Dialogue | None
    ) -> AsyncGenerator[Frame, None]:
        if request.request_id in self._active:
            remedy = "it is already running; give every attempt an id of its own, or end that one by Cancel"
            raise refused("request_id", request.request_id, remedy)
        wanted, most = len(request.members), self.max_in_flight
        if wanted > most:
            remedy = f"ask for at most {most}, or raise max_in_flight of the environment host"
            raise refused("members", wanted, remedy)
        if self._in_flight + wanted > most:
            remedy = "wait for some of them, or raise that"
            text = f"{self._in_flight} rollouts of max_in_flight = {most} run, with no place for {wanted}"
            raise QuartetError("OVERLOADED", f"{text} more; {remedy}", remedy=remedy)
        active = self._active[request.request_id] = ActiveRequest(request)
        self._in_flight += wanted
        left = wanted
        try:
            pool = await self._pool(request.environment)
            with pool.used():
                info = await pool.open()
                ask = None
                if dialogue is not None:
                    dialogue.begin(active.tell)
                    ask = dialogue.ask
                run: Run = partial(pool.run, request, ask=ask)
                if info.group_scoring:
                    _refuse_too_large(request, pool.places_of_a_worker)
                    run = Together(partial(pool.run_together, request, ask=ask)).run
                active.held_up = partial(_held_up, pool)
                active.waits_for = partial(_waits_for, pool, request.request_id)
                active.placed = partial(pool.placed, request.request_id)
                active.places = lambda: pool.room
                active.digest = lambda: pool.told.digest
                active.attempt_s = pool.attempt_s(request, together=info.group_scoring)
                active.start(run, pool.places)
                counted = tally(pool.env_id)
                while left:
                    ended = await active.read()
                    if isinstance(ended, envhost_service_pb2.ModelQuestion):
                        yield ended
                        continue
                    left -= 1
                    self._in_flight -= 1
                    counted.ended(ended)
                    yield ended
        finally:
            self._in_flight -= left
            if active.started:
                tally(request.environment.id).left(left)
            del self._active[request.request_id]
            self._request_ended.set()
            self._progress()  # the limit may be lower from here on
            for task in list(active.tasks):
                task.cancel()

    def cancel(self, run_id: str, request_ids: list[str]) -> int:
        """End requests of a run, or all of it; how many rollouts that ended."""
        count = 0
        for active in self._active.values():
            request = active.request
            if request.run_id == run_id and (not request_ids or request.request_id in request_ids):
                count += active.cancel()
        return count

    def unfinished(self, request_id: str) -> int:
        """Members of a request that still run."""
        active = self._active.get(request_id)
        return active.unfinished if active is not None else 0

    def queued(self, request_id: str) -> int:
        """Members of a request that have no place in a worker now."""
        active = self._active.get(request_id)
        if active is None:
            return 0
        # Those of a group that is scored together may have ended, by Cancel, before they leave their places.
        return max(0, active.unfinished - active.placed())

    def places(self, request_id: str) -> int:
        """Rollouts of the environment of a request that can be under way at once in the workers that live."""
        active = self._active.get(request_id)
        return active.places() if active is not None else 0

    def held_up(self, request_id: str) -> str:
        """Why no turn of a request can be sampled; empty where it can."""
        active = self._active.get(request_id)
        return active.held_up() if active is not None else ""

    def waits_for(self, request_id: str) -> str:
        """What a turn of a request waits for at inference; empty where none waits."""
        active = self._active.get(request_id)
        return active.waits_for() if active is not None else ""

    def digest(self, request_id: str) -> str:
        """Of the environment of a request, as a worker here loaded it last; empty where none has said."""
        active = self._active.get(request_id)
        return active.digest() if active is not None else ""

    async def drain(self) -> None:
        """Refuse new work, and wait for what is under way; workers end when `close` is called."""
        self._draining = True
        if self._active:
            log.info("waiting for rollouts under way", in_flight=self._in_flight)
        while self._active:
            self._request_ended.clear()
            await self._request_ended.wait()

    async def close(self) -> None:
        """Stop all workers."""
        self._draining = True
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        self._pools.clear()
        if self._templates is not None:
            await self._templates.close()

    async def _pool(self, ref: envhost_service_pb2.EnvironmentRef) -> WorkerPool:
        self._refuse_if_draining()
        settings = self._config.environment(ref.id)
        if settings is None:
            hosted = sorted(self._config.environments)
            raise QuartetError(
                "ENVIRONMENT_UNKNOWN",
                f"environment {ref.id!r} is not hosted here; hosted are {', '.join(hosted)}",
                env_id=ref.id,
                hosted=hosted,
            )
        args, written = args_json.read(ref)
        # A pool whose worker found the version that is named.
        key = (canonical_id(ref.id), wanted_version(ref.id), written)
        pool = self._pools.get(key)
        if pool is not None and not pool.failed:
            return pool
        async with self._changing:  # one at a time, or two would take the room that one has made
            pool = self._pools.get(key)
            if pool is not None and pool.failed:
                # Its error was told; whatever was wrong may have been put right since.
                await self._pools.pop(key).close()
                pool = None
            if pool is None:
                await self._make_room()
                self._refuse_if_draining()
                # Templates have imported Verifiers, which one that is built in does not need.
                templates = None if is_built_in(ref.id) else self._templates
                pool = self._pools[key] = WorkerPool(
                    ref.id, args, settings, self._config, self._progress, templates
                )
            return pool

    def _refuse_if_draining(self) -> None:
        if self._draining:
            raise QuartetError("NOT_READY", "the environment host is draining")

    async def _make_room(self) -> None:
        if len(self._pools) < self._config.max_loaded:
            return
        idle = [(pool.last_used, key) for key, pool in self._pools.items() if not pool.in_use]
        if not idle:
            raise QuartetError("OVERLOADED", f"{len(self._pools)} environments are loaded and all are in use")
        _, key = min(idle)
        log.info("environment unloaded", env_id=key[0])
        await self._pools.pop(key).close()


def _templates(config: EnvHostConfig) -> Templates | None:
    """What workers are forked of; None where all are spawned."""
    if not config.fork_workers:
        return None
    if not possible():
        log.warning("workers are spawned, not forked", why="this system is not Linux 5.3 or later")
        return None
    return Templates(config.load_timeout_seconds)


def _held_up(pool: WorkerPool) -> str:
    return next((worker.held_up for worker in pool.workers if worker.held_up), "")


def _waits_for(pool: WorkerPool, request_id: str) -> str:
    return next((text for worker in pool.workers if (text := worker.waits.get(request_id))), "")


def _refuse_too_large(request: envhost_service_pb2.RunRolloutsRequest, places: int) -> None:
    count = len(request.members)
    if count > places:
        remedy = f"ask for at most {places} members, or raise rollouts_per_worker"
        text = f"{request.environment.id!r} scores {count} members together, in one worker; {remedy}"
        raise QuartetError("INVALID_REQUEST", text, field="members", value=count, remedy=remedy)
