"""The workers of one environment: kept alive, chosen by load, watched.

1. A member ends exactly once, as a result or a typed failure; when its worker dies it ends at once as HOST,
   and is tried again on the respawned worker while its retries last.
2. A worker that passes a rollout's deadline and grace, or whose loop is silent, is killed; only its own
   members fail.
3. A worker that dies is respawned after a bounded backoff; one that cannot load says why, and that error
   goes to every caller.
4. At most `rollouts_per_worker` rollouts are under way in a worker; the others wait here, their clocks not
   running.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import structlog
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2, rollout_pb2

from quartet_envhost import failures
from quartet_envhost.config import EnvHostConfig, EnvironmentConfig
from quartet_envhost.frames import Kind
from quartet_envhost.process import WorkerDied, WorkerProcess

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
WATCH_INTERVAL_S: Final = 1.0


class WorkerPool:
    """Workers for one (environment, arguments)."""

    def __init__(
        self, env_id: str, args: dict[str, Any], settings: EnvironmentConfig, config: EnvHostConfig
    ) -> None:
        """Make the pool; `open` starts it."""
        self.env_id = env_id
        self._args = args
        self._settings = settings
        self._config = config
        self._workers: list[WorkerProcess] = []
        # Who waits for a worker with room, first come first; each free place wakes one.
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._keepers: list[asyncio.Task[None]] = []
        self._error: QuartetError | None = None
        self._closed = False
        self._info: envhost_service_pb2.EnvironmentInfo | None = None
        self.in_flight = 0
        self.last_used = time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether the environment could not be loaded; a new pool may try again."""
        return self._error is not None

    @property
    def ready_workers(self) -> int:
        """Workers that take rollouts."""
        return len(self._workers)

    async def open(self) -> envhost_service_pb2.EnvironmentInfo:
        """Start the workers and describe the environment. Raises QuartetError where it cannot be loaded."""
        self.last_used = time.monotonic()
        if not self._keepers:
            self._keepers = [asyncio.create_task(self._keep(slot)) for slot in range(self._settings.workers)]
        # The first description stays true while workers are being respawned.
        if self._info is None:
            await self._wait(lambda: self._info is not None)
        assert self._info is not None
        info = envhost_service_pb2.EnvironmentInfo()
        info.CopyFrom(self._info)
        info.workers = self.ready_workers
        return info

    async def tasks(
        self, request: envhost_service_pb2.GetTasksRequest
    ) -> envhost_service_pb2.GetTasksResponse:
        """Ask a worker for examples."""
        await self.open()
        try:
            async with asyncio.timeout(self._config.load_timeout_seconds):
                worker = await self._acquire()
                answer = await worker.call(Kind.TASKS, request.SerializeToString())
        except (WorkerDied, TimeoutError) as error:
            text = f"environment {self.env_id!r} did not list its tasks: {error or 'no answer in time'}"
            raise QuartetError("ENVIRONMENT_UNAVAILABLE", text, env_id=self.env_id) from error
        finally:
            self._wake(1)
        return envhost_service_pb2.GetTasksResponse.FromString(answer)

    async def run(self, request: envhost_service_pb2.RunRolloutsRequest, member: int) -> rollout_pb2.Rollout:
        """Run one member to its end. Raises nothing but CancelledError and QuartetError(RESOURCE_UNKNOWN)."""
        one = envhost_service_pb2.RunRolloutsRequest()
        one.CopyFrom(request)
        one.ClearField("members")
        one.members.append(member)
        if not one.timeout_ms:
            one.timeout_ms = round(self._config.timeout_seconds * 1000)
        self.in_flight += 1
        try:
            for attempt in range(request.max_retries + 1):
                if attempt:
                    await asyncio.sleep(random.uniform(0, min(RETRY_CAP_S, RETRY_BASE_S * 2**attempt)))
                rollout = await self._attempt(one)
                if not rollout.failure.retryable:
                    break
            return rollout
        finally:
            self.in_flight -= 1
            self.last_used = time.monotonic()

    async def close(self) -> None:
        """Stop every worker."""
        self._closed = True
        self._wake_all()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _attempt(self, one: envhost_service_pb2.RunRolloutsRequest) -> rollout_pb2.Rollout:
        member, timeout_s = one.members[0], one.timeout_ms / 1000
        try:
            worker = await self._acquire()
        except QuartetError as error:
            return failures.failed(member, failures.HOST, str(error), retryable=True)
        try:
            async with asyncio.timeout(timeout_s + self._config.deadline_grace_seconds):
                answer = await worker.call(Kind.RUN, one.SerializeToString())
        except WorkerDied as died:
            return failures.failed(member, failures.HOST, str(died), retryable=True)
        except TimeoutError:
            worker.kill(f"worker {worker.pid} did not end a rollout at its deadline and was stopped")
            text = f"not done after {timeout_s:g} s, and its worker no longer answered"
            return failures.failed(member, failures.TIMEOUT, text, retryable=False)
        finally:
            self._wake(1)
        return rollout_pb2.Rollout.FromString(answer)

    async def _acquire(self) -> WorkerProcess:
        """The least loaded worker that has room."""

        def best() -> WorkerProcess | None:
            room = [w for w in self._workers if w.alive and w.load < self._settings.rollouts_per_worker]
            return min(room, key=lambda one: one.load, default=None)

        await self._wait(lambda: best() is not None)
        worker = best()
        assert worker is not None
        return worker

    async def _wait(self, done: Callable[[], bool]) -> None:
        while True:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise QuartetError("NOT_READY", f"the workers of {self.env_id!r} are being stopped")
            if done():
                return
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if not waiter.cancelled():  # Woken and cancelled at once: the place is the next one's.
                    self._wake(1)
                raise

    def _wake(self, count: int) -> None:
        while count and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def _wake_all(self) -> None:
        self._wake(len(self._waiters))

    async def _keep(self, slot: int) -> None:
        """Keep one worker alive until the pool closes or the environment turns out not to load."""
        failed_starts = deaths = 0
        while self._error is None:
            worker: WorkerProcess | None = None
            started = time.monotonic()
            try:
                worker = await WorkerProcess.spawn(self._settings.python, self._settings.env)
                await self._load(worker)
                failed_starts = 0
                log.info("worker ready", env_id=self.env_id, slot=slot, pid=worker.pid)
                await self._watch(worker)
                deaths = 1 if time.monotonic() - started > HEALTHY_S else deaths + 1
            except WorkerDied as died:
                failed_starts += 1
                deaths += 1
                log.warning("worker did not start", env_id=self.env_id, slot=slot, why=str(died))
                if failed_starts >= MAX_FAILED_STARTS:
                    self._error = QuartetError("ENVIRONMENT_UNAVAILABLE", str(died), env_id=self.env_id)
            except QuartetError as refused:
                self._error = refused
            finally:
                if worker is not None:
                    await worker.stop()
                self._wake_all()
            if self._error is None:
                pause = min(RESPAWN_CAP_S, RESPAWN_BASE_S * 2 ** min(deaths - 1, 16))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _load(self, worker: WorkerProcess) -> None:
        settings = {
            "id": self.env_id,
            "args": self._args,
            "inference_addresses": self._config.inference_addresses,
            "security": self._config.inference_security.model_dump(mode="json"),
        }
        try:
            async with asyncio.timeout(self._config.load_timeout_seconds):
                answer = await worker.open(settings)
        except TimeoutError:
            text = (
                f"environment {self.env_id!r} was not loaded within {self._config.load_timeout_seconds:g} s"
            )
            raise WorkerDied(text) from None
        except WorkerDied as died:
            if worker.spoke.is_set():
                raise WorkerDied(f"{died} while it loaded environment {self.env_id!r}") from None
            raise QuartetError(
                "ENVIRONMENT_UNAVAILABLE",
                f"interpreter {self._settings.python} cannot run the worker ({died}); "
                "install 'quartet-envhost[verifiers]' and the environment into it",
                env_id=self.env_id,
                python=self._settings.python,
            ) from died
        self._info = envhost_service_pb2.EnvironmentInfo.FromString(answer)

    async def _watch(self, worker: WorkerProcess) -> None:
        """Offer the worker for calls until it ends; stop it when its loop is silent."""
        self._workers.append(worker)
        self._wake_all()
        ended = asyncio.create_task(worker.wait())
        try:
            while not ended.done():
                await asyncio.wait([ended], timeout=WATCH_INTERVAL_S)
                if not ended.done() and worker.silent_seconds > self._config.stall_seconds:
                    worker.kill(
                        f"worker {worker.pid} was silent for {worker.silent_seconds:.0f} s and was stopped"
                    )
            log.warning("worker ended", env_id=self.env_id, pid=worker.pid, why=ended.result())
        finally:
            self._workers.remove(worker)
            ended.cancel()
