"""The environments of this host: which are hosted, which are loaded, what runs.

1. Every member of an accepted request ends exactly once, as a result or a typed failure, in the order of
   ending; a cancelled one ends as CANCELLED.
2. At most `max_in_flight` members are accepted and unfinished; more are refused whole as OVERLOADED.
3. Equal (id, args) share their workers. At most `max_loaded` pairs have workers; an idle one makes room.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import structlog
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2, rollout_pb2

from quartet_envhost import failures
from quartet_envhost.config import EnvHostConfig, canonical_id
from quartet_envhost.pool import WorkerPool

log = structlog.get_logger()


class ActiveRequest:
    """The members of one RunRollouts call."""

    def __init__(self, request: envhost_service_pb2.RunRolloutsRequest) -> None:
        """Nothing runs yet."""
        self.request = request
        self.cancelled = False
        self.started = False
        self.tasks: set[asyncio.Task[rollout_pb2.Rollout]] = set()
        # At most one entry for each member.
        self.ended: asyncio.Queue[rollout_pb2.Rollout | BaseException] = asyncio.Queue()

    @property
    def unfinished(self) -> int:
        """Members that still run."""
        return len(self.tasks) if self.started else len(self.request.members)

    def start(self, member: int, work: Coroutine[Any, Any, rollout_pb2.Rollout]) -> None:
        """Run a member; however it ends, that is put into `ended`."""
        task = asyncio.create_task(work)
        self.tasks.add(task)

        # A callback, because a task that is cancelled before its first step runs none of its own code.
        def note(done: asyncio.Task[rollout_pb2.Rollout]) -> None:
            self.tasks.discard(done)
            if done.cancelled():
                self.ended.put_nowait(_cancelled(member))
            else:
                self.ended.put_nowait(done.exception() or done.result())

        task.add_done_callback(note)

    def cancel(self) -> int:
        """End all members as CANCELLED; how many that were."""
        self.cancelled = True
        return sum([task.cancel() for task in self.tasks]) if self.started else len(self.request.members)


class EnvironmentHost:
    """Pools of workers, and the requests they serve."""

    def __init__(self, config: EnvHostConfig, progress: Callable[[], None] = lambda: None) -> None:
        """Start nothing; workers start when their environment is first asked for."""
        self._config = config
        self._progress = progress
        self._pools: dict[tuple[str, str], WorkerPool] = {}
        self._active: dict[str, ActiveRequest] = {}
        self._in_flight = 0
        self._draining = False

    @property
    def in_flight(self) -> int:
        """Members accepted and unfinished."""
        return self._in_flight

    def hosted(self) -> list[envhost_service_pb2.EnvironmentInfo]:
        """The configured environments, and the loaded ones."""
        infos: dict[str, envhost_service_pb2.EnvironmentInfo] = {}
        for env_id in [*self._config.environments, *(pool.env_id for pool in self._pools.values())]:
            info = infos.setdefault(
                canonical_id(env_id), envhost_service_pb2.EnvironmentInfo(id=env_id, api="v1")
            )
            info.workers = sum(
                pool.ready_workers
                for pool in self._pools.values()
                if canonical_id(pool.env_id) == canonical_id(env_id)
            )
        return list(infos.values())

    async def describe(self, ref: envhost_service_pb2.EnvironmentRef) -> envhost_service_pb2.EnvironmentInfo:
        """Load an environment and describe it."""
        return await (await self._pool(ref)).open()

    async def tasks(
        self, request: envhost_service_pb2.GetTasksRequest
    ) -> envhost_service_pb2.GetTasksResponse:
        """Examples of an environment."""
        return await (await self._pool(request.environment)).tasks(request)

    async def run(
        self, request: envhost_service_pb2.RunRolloutsRequest
    ) -> AsyncGenerator[rollout_pb2.Rollout, None]:
        """The members of a request, each as it ends. Closing the iterator cancels what is left."""
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
        active = self._active[request.request_id] = ActiveRequest(request)
        self._in_flight += len(request.members)
        left = len(request.members)
        try:
            pool = await self._pool(request.environment)
            await pool.open()
            active.started = True
            if active.cancelled:  # While the environment was being loaded.
                for member in request.members:
                    active.ended.put_nowait(_cancelled(member))
            else:
                for member in request.members:
                    active.start(member, pool.run(request, member))
            while left:
                ended = await active.ended.get()
                if isinstance(ended, BaseException):
                    raise ended
                left -= 1
                self._in_flight -= 1
                self._progress()
                yield ended
        finally:
            self._in_flight -= left
            del self._active[request.request_id]
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
        if self._draining:
            raise QuartetError("NOT_READY", "the environment host is draining")
        settings = self._config.environment(ref.id)
        if settings is None:
            hosted = sorted(self._config.environments)
            raise QuartetError(
                "ENVIRONMENT_UNKNOWN",
                f"environment {ref.id!r} is not hosted here; hosted are {', '.join(hosted)}",
                env_id=ref.id,
                hosted=hosted,
            )
        args = _arguments(ref)
        key = (canonical_id(ref.id), json.dumps(args, sort_keys=True))
        pool = self._pools.get(key)
        if pool is not None and pool.failed:
            # Its error was told; whatever was wrong may have been put right since.
            del self._pools[key]
            await pool.close()
            pool = self._pools.get(key)
        if pool is None:
            await self._make_room()
            pool = self._pools.setdefault(key, WorkerPool(ref.id, args, settings, self._config))
        return pool

    async def _make_room(self) -> None:
        if len(self._pools) < self._config.max_loaded:
            return
        idle = [(pool.last_used, key) for key, pool in self._pools.items() if not pool.in_flight]
        if not idle:
            raise QuartetError("OVERLOADED", f"{len(self._pools)} environments are loaded and all are in use")
        _, key = min(idle)
        log.info("environment unloaded", env_id=key[0])
        await self._pools.pop(key).close()


def _cancelled(member: int) -> rollout_pb2.Rollout:
    return failures.failed(member, failures.CANCELLED, "cancelled by its caller", retryable=False)


def _arguments(ref: envhost_service_pb2.EnvironmentRef) -> dict[str, Any]:
    remedy = 'write the arguments as a JSON object, such as {"num_train": 100}'
    try:
        args = json.loads(ref.args_json or "{}")
    except json.JSONDecodeError as error:
        text = f"the arguments of {ref.id!r} are not JSON: {error}; {remedy}"
        raise QuartetError(
            "INVALID_CONFIG", text, key="args_json", value=ref.args_json, remedy=remedy
        ) from error
    if not isinstance(args, dict):
        text = f"the arguments of {ref.id!r} are not an object; {remedy}"
        raise QuartetError("INVALID_CONFIG", text, key="args_json", value=ref.args_json, remedy=remedy)
    return args
