"""The supervisor: keeps the services of one run alive until the run ends.

1. A service that dies is started again with the same command on the same address, after a delay that
   doubles from FIRST_DELAY_SECONDS to MAX_DELAY_SECONDS and starts over once the service has listened for
   STABLE_SECONDS.
2. A service that never bound (one that serves nothing is bound at once), or that was started again
   MAX_RESTARTS_IN_A_ROW times without listening for that long, is FAILED: `wait_failed` raises with the end
   of its log, and it is not started again. That the machine cannot start it again at this moment counts as a
   death; at the very first start it is raised as it is.
3. `stop` ends all services at once, in bounded time, and their process groups with them.
4. From `start` to the end clients of the same user find the launch's token (quartet.kit.launched).

States: STARTING -> UP -> BACKOFF -> STARTING; STARTING | BACKOFF -> FAILED; any -> STOPPED.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from quartet.kit.launched import Announcement
from quartet.local.child import Child, ChildSpec, child_environment
from quartet.local.fork_client import ForkServer

FIRST_DELAY_SECONDS = 0.1
MAX_DELAY_SECONDS = 5.0
STABLE_SECONDS = 20.0
MAX_RESTARTS_IN_A_ROW = 10
# Inference listens once its engine is ready: a large model from a slow disk, kernels to compile, graphs to
# capture. A process that ends is noticed at once.
BIND_SECONDS = 1800.0


class State(Enum):
    """Where a service stands."""

    STARTING = "starting"
    UP = "up"
    BACKOFF = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


class ServiceFailed(RuntimeError):
    """A service could not be kept alive."""


@dataclass
class Status:
    """What a person sees of a service."""

    name: str
    address: str
    state: State = State.STARTING
    restarts: int = 0
    pid: int | None = None
    #: Of its last death, where that is known.
    why: str = ""


def next_delay(deaths_in_a_row: int) -> float:
    """Seconds to wait before the restart after so many deaths, the first being 1."""
    return float(min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(deaths_in_a_row - 1, 16)))


class Keeper:
    """Keeps one service alive."""

    def __init__(self, spec: ChildSpec, forks: ForkServer) -> None:
        self.spec = spec
        self._forks = forks
        self.status = Status(spec.name, spec.address)
        self.child: Child | None = None
        self.bound_once = asyncio.Event()

    async def keep(self) -> None:
        """Start and restart until the service is given up, which raises ServiceFailed."""
        deaths = 0
        while True:
            self.status.state, why = State.STARTING, ""
            try:
                self.child = await Child.start(self.spec, self._forks)
            except OSError as error:  # there is no process, or no descriptor, left at this moment
                if not self.bound_once.is_set():
                    raise
                code, listened_seconds = 1, 0.0
                why = f"it cannot be started: {error.strerror or error}"
            else:
                code, listened_seconds = await self._live(self.child)
            assert self.child is not None
            deaths = 1 if listened_seconds >= STABLE_SECONDS else deaths + 1
            if not self.bound_once.is_set() or deaths > MAX_RESTARTS_IN_A_ROW:
                raise self._given_up(code, why)
            self.status.why = why or self.child.why()
            self.status.state = State.BACKOFF
            self.status.restarts += 1
            await asyncio.sleep(next_delay(deaths))

    async def _live(self, child: Child) -> tuple[int, float]:
        """One life: bind, die. Its exit code, and for how long it listened: loading proves nothing."""
        self.status.pid = child.pid
        if not await child.wait_bound(BIND_SECONDS):
            return await child.kill(), 0.0
        bound = asyncio.get_running_loop().time()
        self.status.state = State.UP
        self.bound_once.set()
        code = await child.wait()
        child.kill_group()  # workers that it left behind
        return code, asyncio.get_running_loop().time() - bound

    def _given_up(self, code: int, why: str) -> ServiceFailed:
        assert self.child is not None
        self.status.state = State.FAILED
        what = f"died {MAX_RESTARTS_IN_A_ROW} times in a row" if self.bound_once.is_set() else "did not start"
        said = why or self.child.last_words()
        return ServiceFailed(
            f"{self.spec.name} {what} (exit code {code}); from {self.spec.log_file}:\n{said}"
        )


class Supervisor:
    """All services of a run. Use as an async context manager."""

    def __init__(self, specs: Sequence[ChildSpec]) -> None:
        preloads = dict.fromkeys(spec.preload for spec in specs if spec.preload)
        self._forks = ForkServer(list(preloads), child_environment())
        self._keepers = [Keeper(spec, self._forks) for spec in specs]
        self._tasks: list[asyncio.Task[None]] = []
        self._begun = asyncio.Event()
        self._announcements: list[Announcement] = []

    @property
    def statuses(self) -> list[Status]:
        """One for each service, in the order given."""
        return [keeper.status for keeper in self._keepers]

    @property
    def restarts(self) -> dict[str, int]:
        """Restarts by service."""
        return {status.name: status.restarts for status in self.statuses}

    def start(self) -> None:
        """Start all services at once. Raises ConfigError where their token cannot be announced."""
        addresses: dict[Path, list[str]] = {}
        for keeper in self._keepers:
            if (file := keeper.spec.token_file) is not None:
                addresses.setdefault(file, []).append(keeper.spec.address)
        self._announcements = [Announcement(found, file) for file, found in addresses.items()]
        self._tasks = [asyncio.create_task(keeper.keep(), name=keeper.spec.name) for keeper in self._keepers]
        self._begun.set()

    async def wait_bound(self) -> None:
        """Until every service listens. Raises ServiceFailed."""
        bound = asyncio.create_task(self._all_bound())
        failed = asyncio.create_task(self.wait_failed())
        try:
            done, _ = await asyncio.wait({bound, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed in done:
                failed.result()
        finally:
            bound.cancel()
            failed.cancel()
            await asyncio.gather(bound, failed, return_exceptions=True)

    async def _all_bound(self) -> None:
        for keeper in self._keepers:
            await keeper.bound_once.wait()

    async def wait_failed(self) -> None:
        """For ever, or until a service is given up: raises ServiceFailed."""
        await self._begun.wait()
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def stop(self, drain_s: float) -> None:
        """SIGTERM to all, so long to drain, SIGKILL to what is left."""
        await self._end_keeping()
        children = [keeper.child for keeper in self._keepers if keeper.child is not None]
        await asyncio.gather(*(child.stop(drain_s) for child in children))
        await self._stopped(children)

    async def kill(self) -> None:
        """SIGKILL to all."""
        await self._end_keeping()
        children = [keeper.child for keeper in self._keepers if keeper.child is not None]
        await asyncio.gather(*(child.kill() for child in children))
        await self._stopped(children)

    def kill_now(self) -> None:
        """SIGKILL to all without waiting, from a signal handler."""
        for keeper in self._keepers:
            if keeper.child is not None:
                keeper.child.kill_group()
        self._forks.kill_now()
        self._withdraw()

    def _withdraw(self) -> None:
        while self._announcements:
            self._announcements.pop().close()

    async def _end_keeping(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stopped(self, children: Sequence[Child]) -> None:
        await self._forks.close()
        self._withdraw()
        for child in children:
            child.kill_group()
        for status in self.statuses:
            status.state = State.STOPPED if status.state is not State.FAILED else State.FAILED
