"""The workers of one environment: kept alive, chosen by load, watched.

1. A member ends exactly once, as a result or a typed failure; when its worker dies it ends at once as HOST,
   and is tried again on the respawned worker while its retries last.
2. A worker that passes a rollout's deadline and grace, or that is over its limits (watch.py), is killed with
   all that it started; only its own members fail, and are told why.
3. A worker that dies is respawned after a bounded backoff; one that cannot load says why. Where the
   environment was never described, or no other worker lives or starts, that error goes to every caller; else
   it is logged, and tried again.
4. At most `rollouts_per_worker` rollouts are under way in a worker; the others wait (places.py), their
   clocks not running.
5. What is tried again says how often it failed before: what survived is no fair sample of what was begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Final

import structlog
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2, rollout_pb2

from quartet_envhost import failures
from quartet_envhost.config import EnvHostConfig, EnvironmentConfig
from quartet_envhost.frames import Kind
from quartet_envhost.places import Places
from quartet_envhost.process import Ask, WorkerDied, WorkerProcess
from quartet_envhost.spans import traced
from quartet_envhost.tally import tally
from quartet_envhost.together import asked_of, time_limit_s
from quartet_envhost.watch import GIB, Limits, watched

log = structlog.get_logger()

RESPAWN_BASE_S: Final = 0.2
RESPAWN_CAP_S: Final = 15.0
# A worker that lived so long was well; its next respawn is immediate again.
HEALTHY_S: Final = 30.0
# After so many starts in a row that did not reach the loaded state, the environment is called unavailable.
MAX_FAILED_STARTS: Final = 3
# Between two tries of a member.
RETRY_BASE_S: Final = 0.1
RETRY_CAP_S: Final = 5.0


class WorkerPool:
    """Workers for one (environment, arguments)."""

    def __init__(
        self,
        env_id: str,
        args: dict[str, Any],
        settings: EnvironmentConfig,
        config: EnvHostConfig,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the pool; `open` starts it. `progress` is called whenever a start or an attempt has ended."""
        self.env_id = env_id
        self._args = args
        self._settings = settings
        self._config = config
        self._progress = progress
        self._limits = Limits(settings.max_memory_gb, settings.max_processes, config.stall_seconds)
        self._places = Places(settings.rollouts_per_worker)
        # Set once the environment is described, cannot be loaded, or is closed.
        self._decided = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._error: QuartetError | None = None
        self._info: envhost_service_pb2.EnvironmentInfo | None = None
        # Workers that are being spawned, or load.
        self._starting = 0
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
        return self._error is not None

    @property
    def workers(self) -> list[WorkerProcess]:
        """Those that take rollouts."""
        return self._places.workers

    @property
    def told(self) -> envhost_service_pb2.EnvironmentInfo:
        """What the worker told that loaded it last; empty until one has."""
        return self._info or envhost_service_pb2.EnvironmentInfo()

    @property
    def places(self) -> int:
        """Rollouts that can be under way at once."""
        return self._settings.workers * self._settings.rollouts_per_worker

    @property
    def places_of_a_worker(self) -> int:
        """Rollouts that can be under way in one worker; a group that is scored together has no more."""
        return self._settings.rollouts_per_worker

    async def open(self) -> envhost_service_pb2.EnvironmentInfo:
        """Start the workers and describe the environment. Raises QuartetError where it cannot be loaded."""
        if not self._keepers:
            self._keepers = [asyncio.create_task(self._keep(slot)) for slot in range(self._settings.workers)]
        # The first description stays true while workers are being respawned.
        if self._info is None:
            await self._decided.wait()
            if self._error is not None:
                raise copy(self._error)  # one that is raised again collects tracebacks
            if self._info is None:
                raise self._being_stopped()
        assert self._info is not None
        info = envhost_service_pb2.EnvironmentInfo()
        info.CopyFrom(self._info)
        info.workers = len(self.workers)
        return info

    async def tasks(
        self, request: envhost_service_pb2.GetTasksRequest
    ) -> envhost_service_pb2.GetTasksResponse:
        """Ask a worker for examples."""
        await self.open()
        try:
            async with asyncio.timeout(self._config.load_timeout_seconds):
                worker = await self._places.take()
                try:
                    answer = await worker.call(Kind.TASKS, request.SerializeToString())
                finally:
                    self._places.give_back(worker)
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

    async def _tried(
        self,
        request: envhost_service_pb2.RunRolloutsRequest,
        groups: Sequence[Sequence[int]],
        ask: Ask | None,
    ) -> Mapping[int, rollout_pb2.Rollout]:
        """The rollouts of the first of each group, tried again while one may end better."""
        asked = [asked_of(request, members, self._config.timeout_seconds) for members in groups]
        failed = Counter[int]()
        for attempt in range(request.max_retries + 1):
            if attempt:
                await asyncio.sleep(random.uniform(0, min(RETRY_CAP_S, RETRY_BASE_S * 2**attempt)))
            rollouts = await self._attempt(asked, ask)
            for rollout in rollouts:
                rollout.failed_attempts = failed[rollout.member]
                failed[rollout.member] += rollout.HasField("failure")
            if not any(rollout.failure.retryable for rollout in rollouts):
                break
        return {rollout.member: rollout for rollout in rollouts}

    def attempt_s(self, request: envhost_service_pb2.RunRolloutsRequest, *, together: bool) -> float:
        """How long one attempt at a member of it, or at all of them together, may be under way."""
        members = request.members if together else request.members[:1]
        asked = asked_of(request, members, self._config.timeout_seconds)
        return time_limit_s(asked) + self._config.deadline_grace_seconds

    async def close(self) -> None:
        """Stop every worker."""
        self._refuse(self._being_stopped())
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _attempt(
        self, asked: Sequence[envhost_service_pb2.RunRolloutsRequest], ask: Ask | None
    ) -> list[rollout_pb2.Rollout]:
        try:
            worker = await self._places.take(len(asked))
        except QuartetError as error:
            return [
                failures.failed(one.members[0], failures.HOST, str(error), retryable=True) for one in asked
            ]
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
                self._progress()

    async def _answer(
        self, worker: WorkerProcess, one: envhost_service_pb2.RunRolloutsRequest, ask: Ask | None
    ) -> rollout_pb2.Rollout:
        member, limit_s = one.members[0], time_limit_s(one)
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
        return rollout_pb2.Rollout.FromString(answer)

    def _being_stopped(self) -> QuartetError:
        return QuartetError("NOT_READY", f"the workers of {self.env_id!r} are being stopped")

    def _refuse(self, error: QuartetError) -> None:
        """Refused or closed: everybody who waits ends."""
        self._places.refuse(error)
        self._decided.set()

    async def _keep(self, slot: int) -> None:
        """Keep one worker alive until the pool closes or the environment turns out not to load."""
        failed_starts = deaths = 0
        while self._error is None:
            started = time.monotonic()
            refusal: QuartetError | None = None
            try:
                await self._live(slot)
            except WorkerDied as died:
                failed_starts += 1
                deaths += 1
                log.warning("worker did not start", env_id=self.env_id, slot=slot, why=str(died))
                if failed_starts >= MAX_FAILED_STARTS:
                    refusal = QuartetError("ENVIRONMENT_UNAVAILABLE", str(died), env_id=self.env_id)
            except QuartetError as refused:
                deaths += 1
                refusal = refused
            except Exception as error:
                # A fault of the host's own; whoever waits for this worker must not wait for ever.
                log.exception("worker could not be kept", env_id=self.env_id, slot=slot)
                deaths += 1
                text = f"a worker of {self.env_id!r} could not be kept: {type(error).__name__}: {error}"
                refusal = QuartetError("INTERNAL", text, env_id=self.env_id)
            else:
                failed_starts = 0
                deaths = 1 if time.monotonic() - started > HEALTHY_S else deaths + 1
            if refusal is not None:
                self._weigh(refusal, slot)
            if self._error is None:
                pause = min(RESPAWN_CAP_S, RESPAWN_BASE_S * 2 ** min(deaths - 1, 16))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    def _weigh(self, refusal: QuartetError, slot: int) -> None:
        """Whether the environment is unavailable, or only this worker for now."""
        others_live = self._starting > 0 or any(worker.alive for worker in self.workers)
        if self._info is not None and others_live:
            log.warning("worker refused to start", env_id=self.env_id, slot=slot, why=str(refusal))
            return
        self._error = refusal
        self._refuse(refusal)

    async def _live(self, slot: int) -> None:
        """The life of one worker that loads the environment. Raises WorkerDied and QuartetError."""
        worker: WorkerProcess | None = None
        try:
            self._starting += 1
            try:
                worker = await WorkerProcess.spawn(self._settings.python, self._settings.env)
                await self._load(worker)
            finally:
                self._starting -= 1
                self._progress()
            log.info("worker ready", env_id=self.env_id, slot=slot, pid=worker.pid)
            await self._offer(worker)
        finally:
            if worker is not None:
                await worker.stop()

    async def _load(self, worker: WorkerProcess) -> None:
        settings = {
            "id": self.env_id,
            "args": self._args,
            "inference_addresses": self._config.inference_addresses,
            "max_file_bytes": round(self._settings.max_file_gb * GIB),
            "security": self._config.inference_security.model_dump(mode="json"),
        }
        try:
            async with asyncio.timeout(self._config.load_timeout_seconds):
                answer = await worker.open(settings)
        except TimeoutError:
            limit = f"{self._config.load_timeout_seconds:g} s"
            text = f"environment {self.env_id!r} was not loaded within {limit}"
            place = await worker.kill_hung(text)
            raise WorkerDied(f"{place}{text}") from None
        except WorkerDied as died:
            if worker.spoke.is_set():
                raise WorkerDied(f"{died} while it loaded environment {self.env_id!r}") from None
            raise QuartetError(
                "ENVIRONMENT_UNAVAILABLE",
                f"interpreter {self._settings.python} cannot run the worker ({died}); "
                "install 'quartet-envhost[verifiers]' (or [verifiers-classic]) and the environment into it",
                env_id=self.env_id,
                python=self._settings.python,
            ) from died
        self._info = envhost_service_pb2.EnvironmentInfo.FromString(answer)
        self._decided.set()

    async def _offer(self, worker: WorkerProcess) -> None:
        """Let calls have the worker until it ends."""
        self._places.add(worker)
        try:
            why = await watched(worker, self.env_id, self._limits)
            log.warning("worker ended", env_id=self.env_id, pid=worker.pid, why=why)
            tally(self.env_id).restarted()
        finally:
            self._places.remove(worker)
