"""Runs that are deleted: the journal here and the states at the trainer, as one, whatever dies on the way.

1. Before anything goes, the trainer is asked whether it can delete the run's states, and what there is. What
   it refuses is refused, like a run that works or waits, and a run of that name there which was driven
   further by somebody else; then nothing was changed.
2. Then the run's folder gets a name that no run has, which the disk has before anything is removed: a kill at
   any moment leaves the whole run, or none that anybody finds, and whose rest goes.
3. States go first. For as long as they are there the name is not free: whoever submits it, or deletes it
   again, has that done, as this process does by itself after growing pauses, and the next one.
4. Nothing of another run is touched. The trainer is not asked about a run that somebody else trained.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import structlog
from quartet.errors import QuartetError
from quartet.kit.unknown import enum_name
from quartet.v1 import orchestrator_service_pb2 as pb

from quartet_orchestrator import closing, state
from quartet_orchestrator.book import Book
from quartet_orchestrator.held import Held
from quartet_orchestrator.outage import backoff_s
from quartet_orchestrator.trainer_client import TrainerClient

#: No run's folder begins with "@". In these the trainer's states are still to be deleted, ...
DELETING: Final = "@deleting-"
#: ... and these nobody needs any more.
DELETED: Final = "@deleted-"

log = structlog.get_logger()


def check_rests(run: pb.Run) -> None:
    """Refuses a run that works or waits. Raises INVALID_REQUEST."""
    if run.phase in state.RESTING:
        return
    remedy = "stop it first, and delete it once it is STOPPED"
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
        # By each run whose states are still to be deleted: one at a time deletes them.
        self._pending: dict[str, asyncio.Lock] = {}
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
        """Deletes a run and lets it be forgotten, or only says what would go. `resting` raises where there
        is none that rests, and gives None of one that nobody can read. Raises QuartetError."""
        found = pb.DeleteRunResponse()
        if not self.pending(run_id):
            found = await self._look(run_id, resting())
            if dry_run:
                return found
            # It may have been gone on with, or deleted, meanwhile.
            self._take_away(run_id, resting())
            forget()
        if not dry_run:
            await self.finish(run_id)
        return found

    async def _look(self, run_id: str, held: Held | None) -> pb.DeleteRunResponse:
        found = pb.DeleteRunResponse()
        if _may_have_states(held) and self._trainer is not None:
            try:
                if held is not None:
                    await _check_ours(held.book, self._trainer)
                there = await self._trainer.delete_states(run_id, dry_run=True)
            except QuartetError as error:
                said = f"run {run_id!r} was not deleted: the trainer at {self._trainer.address} says"
                raise _told(error, run_id, f"{said}: {error.message}") from error
            found.states, found.states_bytes = there.states, there.size_bytes
        found.journal_bytes = await asyncio.to_thread(_size_bytes, self._folder / run_id)
        return found

    def _take_away(self, run_id: str, held: Held | None) -> None:
        """From here on there is no such run. Raises NOT_READY; then it is there as before."""
        has_states = _may_have_states(held)
        name = f"{DELETING}{run_id}" if has_states else _unneeded(run_id)
        try:
            (self._folder / run_id).rename(self._folder / name)
        except OSError as error:
            why = f"run {run_id!r} cannot be deleted and is as it was: {error}; mend that and ask again"
            raise QuartetError("NOT_READY", why, run_id=run_id) from error
        log.info("run deleted", run_id=run_id)
        if held is not None:
            held.book.close()
            if held.task is not None:
                held.task.cancel()  # it waits for a trainer that is away, to tell it that the run has ended
        if has_states:
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
            await asyncio.to_thread(_flush, self._folder)
        if (lock := self._pending.get(run_id)) is not None:
            async with lock:
                if self._pending.get(run_id) is lock:
                    await self._delete_states(run_id)
                    del self._pending[run_id]
        for path in await asyncio.to_thread(lambda: [*self._folder.glob(f"{DELETED}{run_id}@*")]):
            await asyncio.to_thread(_remove, path)

    async def _delete_states(self, run_id: str) -> None:
        with _later_on_error(run_id):
            if self._trainer is not None:
                await self._trainer.close_run(run_id, 0)
                await self._trainer.delete_states(run_id, dry_run=False)
            (self._folder / f"{DELETING}{run_id}").rename(self._folder / _unneeded(run_id))
        log.info("states of a deleted run are gone", run_id=run_id)

    def _keep_asking(self, run_id: str) -> None:
        self._pending[run_id] = asyncio.Lock()
        self._beside(self._at_last(run_id, self._pending[run_id]))

    async def _at_last(self, run_id: str, ours: asyncio.Lock) -> None:
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


def _may_have_states(held: Held | None) -> bool:
    """Whether a trainer of Quartet's may have states of a run."""
    return held is None or held.config is None or not held.config.external_trainer


async def _check_ours(book: Book, trainer: TrainerClient) -> None:
    try:
        there = await trainer.get(book.state.run_id)
    except QuartetError as error:
        if error.reason != "RUN_UNKNOWN":
            raise
        return
    if closing.is_ahead(there, book):
        why = "it was driven further by somebody else, whose states these are; if that is over, CloseRun it"
        raise QuartetError("RUN_CONFLICT", why, run_id=book.state.run_id)


def _unneeded(run_id: str) -> str:
    return f"{DELETED}{run_id}@{time.time_ns()}"


def _told(error: QuartetError, run_id: str, message: str) -> QuartetError:
    """What the trainer said, as by the orchestrator: that it refuses that is no fault of the caller's."""
    reason = "NOT_READY" if error.reason == "UNAUTHENTICATED" else error.reason
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
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return  # somebody else removes it
    except OSError as error:
        log.warning("not removed; the next start removes it", path=str(folder), why=str(error))
