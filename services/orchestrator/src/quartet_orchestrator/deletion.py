"""Runs that are deleted: the journal here and the states at the trainer, as one, whatever dies on the way.

1. Before anything goes, the trainer is asked whether it can delete the run's states, and what there is. What
   it refuses is refused, like a run that works or waits, and states of another run of that name (claim.py);
   then nothing was changed.
2. Then the run's folder gets a name that no run has, which the disk has before anything is removed: a kill at
   any moment leaves the whole run, or none that anybody finds, and whose rest goes.
3. States go first. For as long as they are there the name is not free: whoever submits it, or deletes it
   again, has that done, as this process does by itself after growing pauses, and the next one. Where what
   has the name by then is another run's, nothing is left to be done.
4. Nothing of another run is touched.
5. One at a time looks at what there is of a run, or deletes it, or opens one that could not be opened.
"""

from __future__ import annotations

import asyncio
import shutil
import stat
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import structlog
from quartet.errors import QuartetError
from quartet.kit.folder import flush
from quartet.kit.unknown import enum_name
from quartet.v1 import orchestrator_service_pb2 as pb

from quartet_orchestrator import claim, state
from quartet_orchestrator.claim import Claim
from quartet_orchestrator.held import Held
from quartet_orchestrator.outage import backoff_s
from quartet_orchestrator.shelf import DELETED, DELETING
from quartet_orchestrator.trainer_client import TrainerClient

log = structlog.get_logger()


def check_rests(run: pb.Run) -> None:
    """Refuses a run that works or waits. Raises INVALID_REQUEST."""
    if run.phase in state.RESTING:
        return
    if run.phase == state.STOPPING:
        remedy = "it stops after the step under way; delete it once it is STOPPED"
    else:
        remedy = f"stop it first with 'quartet stop {run.run_id}', and delete it once it is STOPPED"
    raise QuartetError(
        "INVALID_REQUEST",
        f"run {run.run_id!r} is {enum_name(pb.RunPhase, run.phase)} and cannot be deleted; {remedy}",
        field="run_id",
        value=run.run_id,
        remedy=remedy,
    )


class Deletions:
    """Of the runs of one folder."""

    def __init__(self, folder: Path, trainer: TrainerClient | None) -> None:
        self._folder, self._trainer = folder, trainer
        # By each run whose states are still to be deleted: that it is this deletion of the name.
        self._pending: dict[str, object] = {}
        self._one_at_a_time: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Goes on with what an earlier process left."""
        for path in sorted(self._folder.iterdir()):
            if path.name.startswith(DELETING):
                self._keep_asking(path.name.removeprefix(DELETING))
            elif path.name.startswith(DELETED):
                self._beside(asyncio.to_thread(_remove, path))

    def pending(self, run_id: str) -> bool:
        """Whether a run of that name was deleted and its states are not yet."""
        return run_id in self._pending

    async def delete(
        self, run_id: str, resting: Callable[[], Held | None], forget: Callable[[], None], *, dry_run: bool
    ) -> pb.DeleteRunResponse:
        """Deletes a run and lets it be forgotten, or only says what would go, or is left. `resting` raises
        where there is none that rests, and gives None of one that was set aside or cannot be opened. Raises
        QuartetError."""
        async with self.alone(run_id):
            if self.pending(run_id):
                with _later_on_error(run_id):
                    found = await self._left(run_id)
            else:
                found = await self._look(run_id, resting())
                if not dry_run:
                    # It may have been gone on with meanwhile.
                    self._take_away(run_id, resting())
                    forget()
        if not dry_run:
            await self.finish(run_id)
        return found

    def alone(self, run_id: str) -> asyncio.Lock:
        """Held by the one who looks at what there is of a run, or takes it away, or opens it late."""
        return self._one_at_a_time.setdefault(run_id, asyncio.Lock())

    async def _look(self, run_id: str, held: Held | None) -> pb.DeleteRunResponse:
        folder = self._folder / run_id
        try:
            if held is not None:
                ours = claim.of(run_id, held.book)
            else:
                ours = await asyncio.to_thread(claim.read, run_id, folder)
            return await self._found(folder, ours)
        except OSError as error:
            why = f"run {run_id!r} was not deleted: {error}; mend that and ask again"
            raise QuartetError("NOT_READY", why, run_id=run_id) from error
        except QuartetError as error:
            assert self._trainer is not None
            said = f"run {run_id!r} was not deleted: the trainer at {self._trainer.address} says"
            raise _told(error, run_id, f"{said}: {error.message}") from error

    async def _left(self, run_id: str) -> pb.DeleteRunResponse:
        folder = self._folder / f"{DELETING}{run_id}"
        ours = await asyncio.to_thread(claim.read, run_id, folder)
        return await self._found(folder, ours, others_stay=True)

    async def _found(
        self, folder: Path, ours: Claim | None, *, others_stay: bool = False
    ) -> pb.DeleteRunResponse:
        found = pb.DeleteRunResponse()
        if ours is not None and self._trainer is not None:
            try:
                there = await ours.stock(self._trainer)
                found.states, found.states_bytes = there.states, there.size_bytes
            except QuartetError as error:
                if error.reason != "RUN_CONFLICT" or (ours.has_states and not others_stay):
                    raise
        found.journal_bytes = await asyncio.to_thread(_size_bytes, folder)
        return found

    def _take_away(self, run_id: str, held: Held | None) -> None:
        """From here on there is no such run. Raises NOT_READY; then it is there as before."""
        try:
            (self._folder / run_id).rename(self._folder / f"{DELETING}{run_id}")
        except OSError as error:
            why = f"run {run_id!r} cannot be deleted and is as it was: {error}; mend that and ask again"
            raise QuartetError("NOT_READY", why, run_id=run_id) from error
        log.info("run deleted", run_id=run_id)
        if held is not None:
            held.book.close()
            if held.task is not None:
                held.task.cancel()  # it waits for a trainer that is away, to tell it that the run has ended
        self._keep_asking(run_id)

    async def finish(self, run_id: str) -> None:
        """Returns once nothing is left of what was taken away. Raises QuartetError: it is done later."""
        # To its end, also where the caller has left.
        await asyncio.shield(self._beside(self._finish(run_id)))

    async def close(self) -> None:
        """Leaves the rest to the next process."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _finish(self, run_id: str) -> None:
        with _later_on_error(run_id):
            await asyncio.to_thread(flush, self._folder)
        async with self.alone(run_id):
            if self.pending(run_id):
                with _later_on_error(run_id):
                    await self._delete_states(run_id)
                del self._pending[run_id]
            # Of two that remove a folder at once, one would return before it is gone.
            await asyncio.to_thread(_remove_all, self._folder, f"{DELETED}{run_id}@")

    async def _delete_states(self, run_id: str) -> None:
        folder = self._folder / f"{DELETING}{run_id}"
        ours = await asyncio.to_thread(claim.read, run_id, folder)
        if ours is not None and self._trainer is not None:
            try:
                await ours.give_up(self._trainer)
            except QuartetError as error:
                if error.reason != "RUN_CONFLICT":
                    raise
                log.warning("what has the name of a deleted run stays", run_id=run_id, why=error.message)
        folder.rename(self._folder / f"{DELETED}{run_id}@{time.time_ns()}")
        log.info("nothing is left of a deleted run", run_id=run_id)

    def _keep_asking(self, run_id: str) -> None:
        self._pending[run_id] = object()
        self._beside(self._at_last(run_id, self._pending[run_id]))

    async def _at_last(self, run_id: str, ours: object) -> None:
        """Whoever asked may have left before the trainer came back."""
        tries = 0
        while self._pending.get(run_id) is ours:
            await asyncio.sleep(backoff_s(tries))
            tries += 1
            try:
                await self._finish(run_id)
            except QuartetError as error:
                log.debug("states of a deleted run are not gone", run_id=run_id, why=error.message)

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _told(error: QuartetError, run_id: str, message: str) -> QuartetError:
    """What the trainer said, as by the orchestrator: that it refuses that, or is silent, is no fault of the
    caller's."""
    reason = "NOT_READY" if error.reason in ("UNAUTHENTICATED", "DEADLINE") else error.reason
    return QuartetError(reason, message, run_id=run_id)


@contextmanager
def _later_on_error(run_id: str) -> Iterator[None]:
    """There is no such run any more; what fails in here is said, and done later."""
    gone = f"run {run_id!r} is deleted here, and what it has at the trainer is not yet"
    later = "it goes as soon as that is mended, and until then the name is not free"
    try:
        yield
    except OSError as error:
        raise QuartetError("NOT_READY", f"{gone}: {error}; {later}", run_id=run_id) from error
    except QuartetError as error:
        raise _told(error, run_id, f"{gone}: {error.message}; {later}") from error


def _size_bytes(folder: Path) -> int:
    """Of what is there now: the files of an index come and go. Raises OSError."""
    size_bytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            found = path.lstat()
            size_bytes += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return size_bytes


def _remove_all(folder: Path, prefix: str) -> None:
    for path in [path for path in folder.iterdir() if path.name.startswith(prefix)]:
        _remove(path)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return  # somebody else removes it
    except OSError as error:
        log.warning("not removed; the next start removes it", path=str(folder), why=str(error))
