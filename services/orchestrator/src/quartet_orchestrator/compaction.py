"""Compaction: keeps a run's journal within its size by giving up what no replay can need any more.

1. Nothing is given up while the journal is within `journal_keep_bytes`.
2. Given up are the samples and messages of rollouts, with the data of their tasks, and nothing else: every
   record keeps its number, its event, its time and its place in the order, so followers see no gaps, and a
   restart folds the same state.
3. Only rollouts whose step is contained in each of the newest states (`CallPlan.covered_steps`), or was
   acknowledged by a foreign trainer: they are trained or discarded, and no replay reaches them.
4. Sealed segments only, oldest first, each replaced at once by a whole new file. A kill at any moment leaves
   one or the other.
5. Where it is larger all the same, and a segment has to stay for it, a person is told once each time the run
   is begun or gone on with, unless nothing was to be kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import structlog
from quartet.v1.journal_pb2 import JournalRecord

from quartet_orchestrator.book import Book
from quartet_orchestrator.calls import CallPlan
from quartet_orchestrator.journal import Compacted
from quartet_orchestrator.segments import JournalCorrupt

log = structlog.get_logger()


class Compaction:
    """Keeps one run's journal within `keep_bytes`, as far as it holds what nobody needs any more."""

    def __init__(self, book: Book, covered: Callable[[], int], keep_bytes: int) -> None:
        """`covered`: the steps whose rollouts nobody can ask for again."""
        self._book = book
        self._covered = covered
        self._keep_bytes = keep_bytes
        self._told = False

    async def run(self) -> None:
        """Compacts as much as it has to and may. Trouble is logged: the journal is as good as before."""
        if await self._is_held():
            self._tell()

    def _tell(self) -> None:
        size = self._book.journal.size_bytes()
        if self._told or not 0 < self._keep_bytes < size:
            return
        self._told = True
        self._book.note(
            f"the run's journal has {size / 2**30:.1f} GiB, and no more of it can be given up now for "
            f"journal_keep_bytes = {self._keep_bytes}: rollouts stay until each of the ckpt.keep_last newest "
            "states holds their step, or a foreign trainer acknowledged it. See that the orchestrator's disk "
            "has room, or, with Quartet's trainer, save states more often (ckpt.interval) or keep fewer"
        )

    async def _is_held(self) -> bool:
        """Compacts; whether a segment had to stay that would have been given up."""
        journal = self._book.journal
        for segment in journal.uncompacted():
            if journal.size_bytes() <= self._keep_bytes:
                return False
            covered = self._covered()  # only here: the longer a run is, the longer that takes
            try:
                compacted = await _done_or_undone(
                    partial(journal.compact, segment, partial(slim, covered_steps=covered))
                )
                if compacted is None:
                    return True  # it holds rollouts that are still needed, and so do those after it
                journal.swap(compacted)
            except (OSError, JournalCorrupt) as error:
                log.warning("segment not compacted", segment=segment, why=str(error))
                return False
            log.info("segment compacted", segment=segment, given_up_bytes=compacted.given_up_bytes)
        return False


async def _done_or_undone(compact: Callable[[], Compacted | None]) -> Compacted | None:
    """What it makes, in a thread; where nobody waits for it any longer, its file goes when it is done."""
    working = asyncio.create_task(asyncio.to_thread(compact))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        working.add_done_callback(_undone)
        raise


def _undone(working: asyncio.Task[Compacted | None]) -> None:
    if not working.cancelled() and working.exception() is None and (compacted := working.result()):
        compacted.file.unlink(missing_ok=True)


def covered_by_states(book: Book, plan: CallPlan) -> Callable[[], int]:
    """Of a run with Quartet's trainer: the steps that each of the newest states contains."""
    return lambda: plan.covered_steps(book.state.applied_seq_id)


def covered_by_acks(book: Book) -> Callable[[], int]:
    """Of a run with a foreign trainer: what it acknowledged is its own to keep."""
    return lambda: book.state.step


def slim(record: JournalRecord, covered_steps: int) -> JournalRecord | None:
    """The record without what is given up; None where it may not be given up yet."""
    match record.WhichOneof("kind"):
        case "rollout":
            needed, rollout = record.rollout.step > covered_steps, record.rollout.rollout
        case "eval_rollout":
            # The evaluation after the newest of these steps may still be under way.
            needed, rollout = (
                record.eval_rollout.at_step >= covered_steps,
                record.eval_rollout.rollout.rollout,
            )
        case _:
            return record
    if needed:
        return None
    rollout.ClearField("samples")
    rollout.ClearField("messages")
    rollout.ClearField("task_json")
    return record
