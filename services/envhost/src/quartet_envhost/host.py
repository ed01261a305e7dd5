"""The environments of this host: which are hosted, which are loaded, what runs.

1. Every member of an accepted request ends exactly once, as a result or a typed failure, in the order of
   ending; a cancelled one ends as CANCELLED.
2. At most `max_in_flight` members are accepted and unfinished; more are refused whole as OVERLOADED.
3. Equal (id, args) share their workers. At most `max_loaded` pairs have workers; one that nobody loads, asks
   or runs makes room, never another.
4. While UNREAD_BYTES of a request's results wait for its reader, no further member of it starts: what waits
   is bounded by that and by the members that have a place at the time.
5. While `busy`, progress is told at least every `stall_limit_s`: no request waits longer for the end of an
   attempt, or of a worker's start, than those may take. One that waits for its reader is not busy.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import structlog
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2, rollout_pb2

from quartet_envhost import failures
from quartet_envhost.config import EnvHostConfig, PreloadConfig, canonical_id, wanted_version
from quartet_envhost.dialogue import Dialogue
from quartet_envhost.pool import WorkerPool
from quartet_envhost.together import Together

# A reader takes results as fast as they come, unless it has stalled: a few dozen of the largest then wait.
UNREAD_BYTES: Final = 128 * 1024 * 1024
# Written as JSON; with the host's own settings they go to a worker in one frame (frames.py).
MAX_ARGS_BYTES: Final = 3 * 1024 * 1024

# Between one start or attempt and the next: a worker's end, its backoff, a member's (pool.py, process.py).
BETWEEN_S: Final = 30.0

# What the reader of a request is given; questions only where the client samples.
Frame = rollout_pb2.Rollout | envhost_service_pb2.ModelQuestion
# Runs one member to its end.
Run = Callable[[int], Coroutine[Any, Any, rollout_pb2.Rollout]]

log = structlog.get_logger()


class ActiveRequest:
    """The members of one RunRollouts call, and their results until they are read."""

    def __init__(self, request: envhost_service_pb2.RunRolloutsRequest, unread_bytes: int) -> None:
        """Nothing runs yet."""
        self.request = request
        self.cancelled = False
        self.started = False
        # How long one attempt at a member may take; known once the environment is loaded.
        self.attempt_s = 0.0
        self.tasks: set[asyncio.Task[rollout_pb2.Rollout]] = set()
        self._limit = unread_bytes
        # At most one entry for each member, with its size, and its open questions.
        self._ended: asyncio.Queue[tuple[Frame | BaseException, int]] = asyncio.Queue()
        self._unread = 0
        self._room = asyncio.Event()
        self._room.set()

    @property
    def unfinished(self) -> int:
        """Members that still run."""
        return len(self.tasks) if self.started else len(self.request.members)

    @property
    def busy(self) -> bool:
        """Whether it waits for its environment or for rollouts, and not for its reader."""
        return not self.started or bool(self.tasks and self._room.is_set())

    def start(self, run: Run, at_once: int) -> None:
        """Run the members, at most so many at once; however each ends, `read` gives that."""
        self.started = True
        places = asyncio.Semaphore(at_once)
        for member in self.request.members:
            if self.cancelled:  # while the environment was being loaded
                self._put(_cancelled(member))
            else:
                task = asyncio.create_task(self._run(run, member, places))
                self.tasks.add(task)
                # A callback: a task that is cancelled before its first step runs none of its own code.
                task.add_done_callback(partial(self._note, member))

    async def read(self) -> Frame:
        """The next member that ended, or question. Raises what only the whole request can end with."""
        ended, size = await self._ended.get()
        self._unread -= size
        if self._unread < self._limit:
            self._room.set()
        if isinstance(ended, BaseException):
            raise ended
        return ended

    def cancel(self) -> int:
        """End all members as CANCELLED; how many that were."""
        self.cancelled = True
        return sum([task.cancel() for task in self.tasks]) if self.started else len(self.request.members)

    async def _run(
        self,
        run: Run,
        member: int,
        places: asyncio.Semaphore,
    ) -> rollout_pb2.Rollout:
        async with places:
            await self._room.wait()
            return await run(member)

    def _note(self, member: int, done: asyncio.Task[rollout_pb2.Rollout]) -> None:
        self.tasks.discard(done)
        self._put(_cancelled(member) if done.cancelled() else done.exception() or done.result())

    def tell(self, news: envhost_service_pb2.ModelQuestion | QuartetError) -> None:
        """Give the reader a question of a member, or what ends the whole request."""
        self._ended.put_nowait((news, 0))

    def _put(self, ended: rollout_pb2.Rollout | BaseException) -> None:
        size = ended.ByteSize() if isinstance(ended, rollout_pb2.Rollout) else 0
        self._unread += size
        if self._unread >= self._limit:
            self._room.clear()
        self._ended.put_nowait((ended, size))


class EnvironmentHost:
    """Pools of workers, and the requests they serve."""

    def __init__(self, config: EnvHostConfig, progress: Callable[[], None] = lambda: None) -> None:
        """Start nothing."""
        self._config = config
        self._progress = progress
        self._pools: dict[tuple[str, str, str], WorkerPool] = {}
        self._active: dict[str, ActiveRequest] = {}
        self._in_flight = 0
        self._draining = False
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

    def hosted(self) -> list[envhost_service_pb2.EnvironmentInfo]:
        """The configured environments, and the loaded ones."""
        infos: dict[str, envhost_service_pb2.EnvironmentInfo] = {}
        for env_id in [*self._config.environments, *(pool.env_id for pool in self._pools.values())]:
            info = infos.setdefault(canonical_id(env_id), envhost_service_pb2.EnvironmentInfo(id=env_id))
            pools = [
                pool for pool in self._pools.values() if canonical_id(pool.env_id) == canonical_id(env_id)
            ]
            info.workers = sum(len(pool.workers) for pool in pools)
            info.api = next((pool.api for pool in pools if pool.api), "")
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
            return await pool.open()

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
            raise QuartetError(
                "INVALID_REQUEST",
                "the request is already running",
                field="request_id",
                value=request.request_id,
            )
        if self._in_flight + len(request.members) > self._config.max_in_flight:
            raise QuartetError(
                "OVERLOADED",
                f"{self._in_flight} rollouts are in flight; the limit is {self._config.max_in_flight}",
            )
        active = self._active[request.request_id] = ActiveRequest(request, UNREAD_BYTES)
        self._in_flight += len(request.members)
        left = len(request.members)
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
                active.attempt_s = pool.attempt_s(request, together=info.group_scoring)
                active.start(run, pool.places)
                while left:
                    ended = await active.read()
                    if isinstance(ended, envhost_service_pb2.ModelQuestion):
                        yield ended
                        continue
                    left -= 1
                    self._in_flight -= 1
                    yield ended
        finally:
            self._in_flight -= left
            del self._active[request.request_id]
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

    async def drain(self) -> None:
        """Refuse new work; workers end when `close` is called."""
        self._draining = True

    async def close(self) -> None:
        """Stop all workers."""
        self._draining = True
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        self._pools.clear()

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
        args, written = _arguments(ref)
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
                pool = self._pools[key] = WorkerPool(ref.id, args, settings, self._config, self._progress)
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


def _refuse_too_large(request: envhost_service_pb2.RunRolloutsRequest, places: int) -> None:
    count = len(request.members)
    if count > places:
        remedy = f"ask for at most {places} members, or raise rollouts_per_worker"
        text = f"{request.environment.id!r} scores {count} members together, in one worker; {remedy}"
        raise QuartetError("INVALID_REQUEST", text, field="members", value=count, remedy=remedy)


def _cancelled(member: int) -> rollout_pb2.Rollout:
    return failures.failed(member, failures.CANCELLED, "cancelled by its caller", retryable=False)


def _arguments(ref: envhost_service_pb2.EnvironmentRef) -> tuple[dict[str, Any], str]:
    """The arguments, and equal ones always written alike."""
    remedy = 'write the arguments as a JSON object, such as {"num_train": 100}'
    try:
        args = json.loads(ref.args_json or "{}")
        written = json.dumps(args, sort_keys=True)
    except (ValueError, RecursionError) as error:  # nested too deeply is no JSON for this reader
        text = f"the arguments of {ref.id!r} are not JSON: {error}; {remedy}"
        raise QuartetError(
            "INVALID_CONFIG", text, key="args_json", value=ref.args_json, remedy=remedy
        ) from error
    if not isinstance(args, dict):
        text = f"the arguments of {ref.id!r} are not an object; {remedy}"
        raise QuartetError("INVALID_CONFIG", text, key="args_json", value=ref.args_json, remedy=remedy)
    # As they came, and as a worker is told them: numbers and accents may be longer there.
    size = max(len(ref.args_json.encode()), len(written))
    if size > MAX_ARGS_BYTES:
        remedy = f"at most {MAX_ARGS_BYTES} bytes; name a file instead"
        text = f"the arguments of {ref.id!r} have {size} bytes; {remedy}"
        raise QuartetError("INVALID_CONFIG", text, key="args_json", value=size, remedy=remedy)
    return args, written
