"""What callers have of one environment: its tasks, and rollouts that run on its workers.

1. A member ends exactly once, as a result or a typed failure; when its worker dies it ends at once as HOST,
   and is tried again on the respawned worker while its retries last.
2. A worker that passes a rollout's deadline and grace is killed with all that it started; only its own
   members fail, and are told why.
3. At most `rollouts_per_worker` rollouts are under way in a worker; the others wait (places.py), their
   clocks not running.
4. What is tried again says how often it failed before, and as what it did last: what survived is no fair
   sample of what was begun.
5. A rollout has no more time than its caller: one that waits says for what before the caller's clock ends it,
   and what that cut short is a TIMEOUT that is retryable. Nothing is tried again in the last AGAIN_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from quartet.errors import QuartetError
from quartet.kit import context as request_context
from quartet.kit.backoff import pause_s
from quartet.v1 import envhost_service_pb2, rollout_pb2

from quartet_envhost import failures
from quartet_envhost.config import EnvHostConfig, EnvironmentConfig
from quartet_envhost.frames import Kind
from quartet_envhost.keeping import Keeper
from quartet_envhost.places import Places
from quartet_envhost.process import Ask, WorkerDied, WorkerProcess
from quartet_envhost.spans import traced
from quartet_envhost.templates import Templates
from quartet_envhost.together import asked_of, time_limit_s, within

# Between two tries of a member.
RETRY_BASE_S: Final = 0.1
RETRY_CAP_S: Final = 5.0
# Of a caller's time: less is no try.
AGAIN_S: Final = 1.0


class WorkerPool:
    """Workers for one (environment, arguments)."""

    def __init__(
        self,
        env_id: str,
        args: dict[str, Any],
        settings: EnvironmentConfig,
        config: EnvHostConfig,
        progress: Callable[[], None] = lambda: None,
        templates: Templates | None = None,
    ) -> None:
        """Make the pool; `open` starts it. `progress` is called whenever a start or an attempt has ended;
        `templates` are what workers are forked of."""
        self.env_id = env_id
        self._settings = settings
        self._config = config
        self._progress = progress
        self._places = Places(settings.rollouts_per_worker)
        self._keeper = Keeper(env_id, args, settings, config, self._places, progress, templates)
        # Of each request, the places that its members have.
        self._placed = Counter[str]()
        self._users = 0
        self.last_used = time.monotonic()

    @property
    def in_use(self) -> bool:
        """Whether somebody loads it, asks it or runs rollouts in it."""
        return self._users > 0

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """While inside, the pool is not closed to make room for another."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.last_used = time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether the environment could not be loaded; a new pool may try again."""
        return self._keeper.failed

    @property
    def workers(self) -> list[WorkerProcess]:
        """Those that take rollouts."""
        return self._places.workers

    @property
    def told(self) -> envhost_service_pb2.EnvironmentInfo:
        """What the worker told that loaded it last; empty until one has."""
        return self._keeper.told

    @property
    def places(self) -> int:
        """Rollouts that can be under way at once where all workers live."""
        return self._settings.workers * self._settings.rollouts_per_worker

    @property
    def room(self) -> int:
        """As `places`, in the workers that live now."""
        return self._settings.rollouts_per_worker * sum(worker.alive for worker in self.workers)

    def placed(self, request_id: str) -> int:
        """How many members of a request have a place in a worker."""
        return self._placed[request_id]

    @property
    def places_of_a_worker(self) -> int:
        """Rollouts that can be under way in one worker; a group that is scored together has no more."""
        return self._settings.rollouts_per_worker

    async def open(self) -> envhost_service_pb2.EnvironmentInfo:
        """Start the workers and describe the environment. Raises QuartetError where it cannot be loaded."""
        info = envhost_service_pb2.EnvironmentInfo()
        info.CopyFrom(await self._keeper.describe())
        info.workers = len(self.workers)
        return info

    async def tasks(
        self, request: envhost_service_pb2.GetTasksRequest
    ) -> envhost_service_pb2.GetTasksResponse:
        """Ask a worker for examples."""
        await self.open()
        try:
            async with asyncio.timeout(self._config.load_timeout_seconds):
                worker = await self._places.one()
                answer = await worker.call(Kind.TASKS, request.SerializeToString())
        except (WorkerDied, TimeoutError) as error:
            text = f"environment {self.env_id!r} did not list its tasks: {str(error) or 'no answer in time'}"
            raise QuartetError("ENVIRONMENT_UNAVAILABLE", text, env_id=self.env_id) from error
        return envhost_service_pb2.GetTasksResponse.FromString(answer)

    async def run(
        self, request: envhost_service_pb2.RunRolloutsRequest, member: int, *, ask: Ask | None = None
    ) -> rollout_pb2.Rollout:
        """Run one member to its end; whoever answers `ask` samples its turns, where that is given.
        Raises nothing but CancelledError and QuartetError(RESOURCE_UNKNOWN)."""
        return (await self._tried(request, [[member]], ask))[member]

    async def run_together(
        self, request: envhost_service_pb2.RunRolloutsRequest, *, ask: Ask | None = None
    ) -> Mapping[int, rollout_pb2.Rollout]:
        """As `run`, for all members of the request at once, which one worker scores together."""
        members = list(request.members)
        groups = [[one, *(other for other in members if other != one)] for one in members]
        return await self._tried(request, groups, ask)

    def attempt_s(self, request: envhost_service_pb2.RunRolloutsRequest, *, together: bool) -> float:
        """How long one attempt at a member of it, or at all of them together, may be under way."""
        members = request.members if together else request.members[:1]
        asked = asked_of(request, members, self._config.timeout_seconds)
        return time_limit_s(asked) + self._config.deadline_grace_seconds

    async def close(self) -> None:
        """Stop every worker."""
        await self._keeper.close()

    async def _tried(
        self,
        request: envhost_service_pb2.RunRolloutsRequest,
        groups: Sequence[Sequence[int]],
        ask: Ask | None,
    ) -> Mapping[int, rollout_pb2.Rollout]:
        """The rollouts of the first of each group, tried again while one may end better."""
        asked = [asked_of(request, members, self._config.timeout_seconds) for members in groups]
        failed, earlier = Counter[int](), dict[int, rollout_pb2.RolloutFailure]()
        for attempt in range(request.max_retries + 1):
            if attempt:
                await asyncio.sleep(pause_s(attempt - 1, RETRY_BASE_S, RETRY_CAP_S))
            rollouts = await self._attempt(asked, ask)
            for rollout in rollouts:
                rollout.failed_attempts = failed[rollout.member]
                if rollout.member in earlier:
                    rollout.earlier_failure.CopyFrom(earlier[rollout.member])
                if rollout.HasField("failure"):
                    failed[rollout.member] += 1
                    # A copy: a part of a message holds all of it.
                    earlier[rollout.member] = rollout_pb2.RolloutFailure()
                    earlier[rollout.member].CopyFrom(rollout.failure)
            if not any(rollout.failure.retryable for rollout in rollouts):
                break
            left_s = request_context.remaining_s()
            if left_s is not None and left_s < AGAIN_S:
                break
        return {rollout.member: rollout for rollout in rollouts}

    async def _attempt(
        self, asked: Sequence[envhost_service_pb2.RunRolloutsRequest], ask: Ask | None
    ) -> list[rollout_pb2.Rollout]:
        try:
            worker = await self._places.take(len(asked))
        except QuartetError as error:
            return [
                failures.failed(one.members[0], failures.HOST, str(error), retryable=True) for one in asked
            ]
        request_id = asked[0].request_id
        self._placed[request_id] += len(asked)
        answers = [
            asyncio.create_task(traced(self.env_id, one, partial(self._answer, worker, one, ask)))
            for one in asked
        ]
        try:
            return await asyncio.gather(*answers)
        finally:
            for answer in answers:
                answer.cancel()
            try:
                # Places are free when nobody is in them.
                await asyncio.gather(*answers, return_exceptions=True)
            finally:  # also where this wait is cancelled in its turn
                self._places.give_back(worker, len(asked))
                self._placed[request_id] -= len(asked)
                if not self._placed[request_id]:
                    del self._placed[request_id]
                self._progress()

    async def _answer(
        self, worker: WorkerProcess, one: envhost_service_pb2.RunRolloutsRequest, ask: Ask | None
    ) -> rollout_pb2.Rollout:
        asked, one = one, within(one, request_context.bounded(None))
        member, limit_s, began = one.members[0], time_limit_s(one), time.monotonic()
        try:
            async with asyncio.timeout(limit_s + self._config.deadline_grace_seconds):
                kind = Kind.RUN if ask is None else Kind.INTERACT
                answer = await worker.call(kind, one.SerializeToString(), ask)
        except WorkerDied as died:
            return failures.failed(member, failures.HOST, str(died), retryable=True)
        except TimeoutError:
            why = f"worker {worker.pid} did not end a rollout at its deadline and was stopped"
            place = await worker.kill_hung(why)
            text = f"{place}not done after {limit_s:g} s, and its worker no longer answered"
            return failures.failed(member, failures.TIMEOUT, text, retryable=False)
        rollout = rollout_pb2.Rollout.FromString(answer)
        if rollout.failure.kind == failures.TIMEOUT:
            # Else it was a time limit of the environment's own, which was over sooner.
            over = time.monotonic() - began >= one.timeout_ms / 1000
            text, cut = rollout.failure.message, over and one is not asked
            if cut:
                text += "; the deadline of the call left it no more time"
            if waited_for := worker.waits.get(one.request_id):
                text += f"; a turn waited for {waited_for}"
            retryable = rollout.failure.retryable or cut
            rollout.failure.MergeFrom(failures.failure(failures.TIMEOUT, text, retryable=retryable))
        return rollout
