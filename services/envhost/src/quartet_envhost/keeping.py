"""How the workers of one environment are kept: started, loaded, watched, and started again.

1. A worker that dies is respawned after a bounded backoff; one that cannot load says why. Where the
   environment was never described, or no other worker lives or starts, that error goes to every caller; else
   it is logged, and tried again.
2. A worker that does not load in time, a template that it waits for (templates.py) included, or that is over
   its limits (watch.py), is killed with all that it started.
3. A worker has places from when it is loaded to its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from copy import copy
from typing import Any, Final

import structlog
from quartet.errors import QuartetError
from quartet.kit.backoff import pause_s
from quartet.v1 import envhost_service_pb2

from quartet_envhost.config import EnvHostConfig, EnvironmentConfig, how_to_install
from quartet_envhost.places import Places
from quartet_envhost.process import WorkerDied, WorkerProcess
from quartet_envhost.tally import tally
from quartet_envhost.templates import Templates
from quartet_envhost.watch import GIB, Limits, watched

log = structlog.get_logger()

RESPAWN_BASE_S: Final = 0.2
RESPAWN_CAP_S: Final = 15.0
# A worker that lived so long was well; its next respawn is immediate again.
HEALTHY_S: Final = 30.0
# After so many starts in a row that did not reach the loaded state, the environment is called unavailable.
MAX_FAILED_STARTS: Final = 3


class Keeper:
    """Keeps the workers of one (environment, arguments) alive."""

    def __init__(
        self,
        env_id: str,
        args: dict[str, Any],
        settings: EnvironmentConfig,
        config: EnvHostConfig,
        places: Places,
        progress: Callable[[], None],
        templates: Templates | None,
    ) -> None:
        """`progress` is called whenever a start has ended; `templates` are what workers are forked of."""
        self._env_id = env_id
        self._args = args
        self._settings = settings
        self._config = config
        self._places = places
        self._progress = progress
        self._templates = templates
        self._limits = Limits(settings.max_memory_gb, settings.max_processes, config.stall_seconds)
        # Set once the environment is described, cannot be loaded, or is closed.
        self._decided = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._error: QuartetError | None = None
        self._info: envhost_service_pb2.EnvironmentInfo | None = None
        # Workers that are being spawned, or load.
        self._starting = 0

    @property
    def failed(self) -> bool:
        """Whether the environment could not be loaded; another keeper may try again."""
        return self._error is not None

    @property
    def told(self) -> envhost_service_pb2.EnvironmentInfo:
        """What the worker told that loaded it last; empty until one has."""
        return self._info or envhost_service_pb2.EnvironmentInfo()

    async def describe(self) -> envhost_service_pb2.EnvironmentInfo:
        """Start the workers, where none was started yet, and wait for what one says of the environment.

        Raises QuartetError where it cannot be loaded.
        """
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._keep(slot)) for slot in range(self._settings.workers)]
        # The first description stays true while workers are being respawned.
        if self._info is None:
            await self._decided.wait()
            if self._error is not None:
                raise copy(self._error)  # one that is raised again collects tracebacks
            if self._info is None:
                raise self._being_stopped()
        return self._info

    async def close(self) -> None:
        """Stop every worker; whoever waits for one is told."""
        self._end_waits(self._being_stopped())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _being_stopped(self) -> QuartetError:
        return QuartetError("NOT_READY", f"the workers of {self._env_id!r} are being stopped")

    def _end_waits(self, error: QuartetError) -> None:
        """Refused or closed: everybody who waits ends."""
        self._places.refuse(error)
        self._decided.set()

    async def _keep(self, slot: int) -> None:
        """Keep one worker alive until the keeper closes or the environment turns out not to load."""
        failed_starts = deaths = 0
        while self._error is None:
            started = time.monotonic()
            refusal: QuartetError | None = None
            try:
                await self._live(slot)
            except WorkerDied as died:
                failed_starts += 1
                deaths += 1
                log.warning("worker did not start", env_id=self._env_id, slot=slot, why=str(died))
                if failed_starts >= MAX_FAILED_STARTS:
                    refusal = QuartetError("ENVIRONMENT_UNAVAILABLE", str(died), env_id=self._env_id)
            except QuartetError as refused:
                deaths += 1
                refusal = refused
            except Exception as error:
                # A fault of the host's own; whoever waits for this worker must not wait for ever.
                log.exception("worker could not be kept", env_id=self._env_id, slot=slot)
                deaths += 1
                text = f"a worker of {self._env_id!r} could not be kept: {type(error).__name__}: {error}"
                refusal = QuartetError("INTERNAL", text, env_id=self._env_id)
            else:
                failed_starts = 0
                deaths = 1 if time.monotonic() - started > HEALTHY_S else deaths + 1
            if refusal is not None:
                self._weigh(refusal, slot)
            if self._error is None:
                await asyncio.sleep(pause_s(deaths - 1, RESPAWN_BASE_S, RESPAWN_CAP_S))

    def _weigh(self, refusal: QuartetError, slot: int) -> None:
        """Whether the environment is unavailable, or only this worker for now."""
        others_live = self._starting > 0 or any(worker.alive for worker in self._places.workers)
        if self._info is not None and others_live:
            log.warning("worker refused to start", env_id=self._env_id, slot=slot, why=str(refusal))
            return
        self._error = refusal
        self._end_waits(refusal)

    async def _live(self, slot: int) -> None:
        """The life of one worker that loads the environment. Raises WorkerDied and QuartetError."""
        worker: WorkerProcess | None = None
        try:
            self._starting += 1
            try:
                async with asyncio.timeout(self._config.load_timeout_seconds):
                    python, env = self._settings.python, self._settings.env
                    worker = await WorkerProcess.spawn(python, env, self._templates)
                    await self._load(worker)
            except TimeoutError:
                limit = f"{self._config.load_timeout_seconds:g} s"
                text = f"environment {self._env_id!r} was not loaded within {limit} (load_timeout_seconds)"
                place = await worker.kill_hung(text) if worker is not None else ""
                raise WorkerDied(f"{place}{text}") from None
            finally:
                self._starting -= 1
                self._progress()
            how = "forked" if worker.forked else "spawned"
            log.info("worker ready", env_id=self._env_id, slot=slot, pid=worker.pid, how=how)
            await self._offer(worker)
        finally:
            if worker is not None:
                await worker.stop()

    async def _load(self, worker: WorkerProcess) -> None:
        settings = {
            "id": self._env_id,
            "args": self._args,
            "inference_addresses": self._config.inference_addresses,
            "max_file_bytes": round(self._settings.max_file_gb * GIB),
            "security": self._config.inference_security.model_dump(mode="json"),
            "log_level": self._config.log_level,
            "stall_seconds": self._config.stall_seconds,
        }
        try:
            answer = await worker.open(settings)
        except WorkerDied as died:
            if worker.spoke.is_set():
                raise WorkerDied(f"{died} while it loaded environment {self._env_id!r}") from None
            raise QuartetError(
                "ENVIRONMENT_UNAVAILABLE",
                f"interpreter {self._settings.python} cannot run the worker ({died}); install the "
                f"environment into it and, in the repository: {how_to_install(self._settings.python)}",
                env_id=self._env_id,
                python=self._settings.python,
            ) from died
        self._info = envhost_service_pb2.EnvironmentInfo.FromString(answer)
        self._decided.set()

    async def _offer(self, worker: WorkerProcess) -> None:
        """Let calls have the worker until it ends."""
        self._places.add(worker)
        try:
            why = await watched(worker, self._env_id, self._limits)
            log.warning("worker ended", env_id=self._env_id, pid=worker.pid, why=why)
            tally(self._env_id).restarted()
        finally:
            self._places.remove(worker)
