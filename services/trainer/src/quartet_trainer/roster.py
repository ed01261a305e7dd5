"""The runs of this process: created, restored, found, and every call of a run applied in its order on the
worker.

1. A run exists here after CreateRun, with its newest sound state restored where one was saved, else as it
   begins; creating it again with an equal spec changes nothing. With one that extends it (more steps after
   its own) it is that longer run from there on.
2. Readers see the run as it stood after its last finished call; they never wait for the worker.
3. Closing a run frees what it holds in memory, after the call under way; its saved states stay, the
   one among them where it was closed, if that was asked for.
4. A run of which a call failed half way is closed and never saved: who calls it next restores it from its
   newest state.
5. A run whose state was saved under another spec is not opened: RUN_CONFLICT, naming the field. One with
   settings that this release does not know is INVALID_CONFIG, like a state of another form.
6. The states of an open run are not deleted all at once, and no run is opened while its states go. One goes
   by its name, also of an open run, between two calls. What is of another spec than its caller's is not
   deleted (deletion.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import structlog
from quartet.errors import QuartetError

from quartet_trainer.beginning import initial_state
from quartet_trainer.content import Content
from quartet_trainer.deletion import Deletion, Stock
from quartet_trainer.initial_adapter import initial_adapter, read_adapter
from quartet_trainer.sequence import Sequence
from quartet_trainer.spec import RunSpec, check_name, extends
from quartet_trainer.states import ORDER_LOST, StateInfo, StateStore
from quartet_trainer.whose import check_same, held_spec
from quartet_trainer.worker import Worker, release_memory

if TYPE_CHECKING:
    from quartet_trainer.results import RunStatus
    from quartet_trainer.run import Run

T = TypeVar("T")

#: Name of the state that closing a run saves.
CLOSED = "closed"

log = structlog.get_logger()


@dataclass(slots=True)
class Entry:
    """A run, its sequence, and its status as readers see it."""

    run: Run
    sequence: Sequence
    status: RunStatus
    states: list[StateInfo] = field(default_factory=list)
    #: As many of its newest states stay, as its caller said last; 0 for nothing.
    keep_last: int = 0


class Roster:
    """Runs by run_id."""

    def __init__(
        self,
        make_run: Callable[[str, RunSpec], Run],
        states: StateStore,
        worker: Worker,
        max_runs: int,
        deletion: Deletion,
    ) -> None:
        self._make_run, self._states, self._worker, self._max_runs = make_run, states, worker, max_runs
        self._deletion = deletion
        self._entries: dict[str, Entry] = {}
        # Creating loads a model: one at a time, and a repeated call waits for the first. Closing waits, too.
        self._opening = asyncio.Lock()

    @property
    def max_runs(self) -> int:
        """As many may be open."""
        return self._max_runs

    def statuses(self) -> dict[str, RunStatus]:
        """Of the open runs, as readers see them; from any thread."""
        return {run_id: entry.status for run_id, entry in list(self._entries.items())}

    def get(self, run_id: str) -> Entry:
        """A run that exists here. Errors: RUN_UNKNOWN."""
        entry = self._entries.get(run_id)
        if entry is None:
            raise _unknown(run_id)
        return entry

    async def create(self, run_id: str, spec: RunSpec, keep_last: int = 0) -> Entry:
        """Open a run, of whose newest states so many stay from here on. Idempotent.

        Errors: INVALID_REQUEST, INVALID_CONFIG, RUN_CONFLICT, OVERLOADED.
        """
        check_name("run_id", run_id)
        async with self._opening:
            entry = self._entries.get(run_id)
            if entry is not None and extends(entry.run.spec, spec):
                # Opened again as the longer one; it is not held here meanwhile, beside that.
                entry = None
                await self._close(run_id, save_at=None)
            elif entry is not None:
                check_same(run_id, entry.run.spec, spec, "this trainer")
                entry.keep_last = keep_last
                return entry
            if len(self._entries) >= self._max_runs:
                open_now, remedy = ", ".join(self._entries), "close one with CloseRun"
                raise QuartetError(
                    "OVERLOADED",
                    f"{self._max_runs} runs are open (max_runs): {open_now}; {remedy}",
                    max_runs=self._max_runs,
                    remedy=remedy,
                )
            entry = await self._worker.run(lambda: self._open(run_id, spec))
            entry.keep_last = keep_last
            self._entries[run_id] = entry
            return entry

    async def close(self, run_id: str, save_at: int) -> None:
        """Close a run, saved first if it stands at call `save_at`, which is not 0.

        Idempotent: one that is not open is closed already. Errors: OVERLOADED.
        """
        async with self._opening:
            await self._close(run_id, save_at)

    async def delete_states(self, run_id: str, spec: RunSpec | None = None, *, dry_run: bool) -> Stock:
        """Delete all states of a run that is not open, of no other than that of the spec, or only say which
        there are. Idempotent.

        Errors: INVALID_REQUEST, RUN_CONFLICT, INVALID_CONFIG, NOT_READY.
        """
        check_name("run_id", run_id)
        if dry_run:
            entry = self._entries.get(run_id)
            if entry is not None and spec is not None and not extends(entry.run.spec, spec):
                check_same(run_id, entry.run.spec, spec, "this trainer")
            return await asyncio.to_thread(self._deletion.stock, run_id, spec)
        async with self._opening:
            if run_id in self._entries:
                why = f"run {run_id} is open here, and its states are what it is restored from"
                raise QuartetError("RUN_CONFLICT", f"{why}; close it with CloseRun first", run_id=run_id)
            found = await asyncio.to_thread(self._deletion.take_away, run_id, spec)
        # Many gigabytes take their time, and hold up nobody who opens another run, or this one anew.
        await asyncio.to_thread(self._deletion.clear, run_id)
        return found

    async def delete_state(self, run_id: str, name: str, spec: RunSpec | None = None) -> Stock:
        """Delete the states of a name of a run that is open or not, of no other than that of the spec.
        Idempotent.

        Errors: INVALID_REQUEST, RUN_CONFLICT, INVALID_CONFIG, OVERLOADED, NOT_READY.
        """
        check_name("run_id", run_id)
        check_name("name", name)
        async with self._opening:
            entry = self._entries.get(run_id)

            def job() -> Stock:
                try:
                    return self._deletion.delete_named(run_id, name, spec)
                finally:  # also where one of several went
                    if entry is not None:
                        entry.states = self._states.list(run_id)

            return await self._worker.run(job)

    async def _close(self, run_id: str, save_at: int | None) -> None:
        """As `close`; None: saved wherever it stands."""
        entry = self._entries.pop(run_id, None)
        if entry is None:
            return
        # No call finds the run from here on; those that found it come before on the worker.
        await entry.sequence.settle()
        # A step that tore it meanwhile closed it, and what is left of it is nothing to save.
        if not entry.run.is_torn:
            applied = entry.sequence.applied
            await self._end(entry, save=applied > 0 and save_at in (None, applied))
        del entry
        await self._worker.run(release_memory, cleans_up=True)
        log.info("run_closed", run_id=run_id)

    async def apply(
        self,
        run_id: str,
        seq_id: int,
        digest: bytes,
        job: Callable[[Entry], T],
        moves_to: Callable[[T], int] | None = None,
    ) -> T:
        """Apply a job as a run's call seq_id. Errors: those of Sequence.apply and of the job."""
        entry = self.get(run_id)

        async def work() -> T:
            try:
                result, status = await self._worker.run(lambda: (job(entry), entry.run.status))
            except BaseException:
                if entry.run.is_torn:
                    await self._drop(run_id, entry)
                raise
            # Here, where its place in the sequence follows at once: who reads both sees them of one call.
            entry.status = status
            return result

        return await entry.sequence.apply(seq_id, digest, work, moves_to)

    async def query(self, run_id: str, job: Callable[[Run], T]) -> T:
        """Run a job that changes nothing, once the calls before it have ended.

        Errors: RUN_UNKNOWN, also where one of these tore the run; and those of the job.
        """
        run = self.get(run_id).run

        def job_if_whole() -> T:
            if run.is_torn:
                raise _unknown(run_id)
            return job(run)

        return await self._worker.run(job_if_whole)

    async def _drop(self, run_id: str, entry: Entry) -> None:
        """Nobody finds the run any more; its states stay."""
        log.error("run_torn", run_id=run_id, applied_seq_id=entry.sequence.applied)
        if self._entries.get(run_id) is entry:
            del self._entries[run_id]
        await self._worker.run(entry.run.close, cleans_up=True)
        await self._worker.run(release_memory, cleans_up=True)

    async def _end(self, entry: Entry, save: bool) -> None:
        def job() -> None:
            if save:
                self.save(entry, CLOSED, entry.sequence.applied)
            entry.run.close()

        try:
            await self._worker.run(job)
        except BaseException:
            # Still open: what it has in memory is all there is of it.
            self._entries[entry.run.run_id] = entry
            raise

    # -- states: jobs for the worker

    def save(
        self, entry: Entry, name: str, seq_id: int, *, export_model: bool = False, keep: bool = False
    ) -> StateInfo:
        """Save a run as it stands after call seq_id, which is this one."""
        run = entry.run
        info = self._states.save(
            run.run_id,
            name,
            seq_id,
            run.status.policy_version,
            run.content(seq_id),
            run.export if export_model else None,
            kept=keep,
            keep_last=entry.keep_last,
        )
        entry.states = self._states.list(run.run_id)
        log.info("state_saved", run_id=run.run_id, state=name, seq_id=seq_id, path=str(info.path))
        return info

    def load(self, entry: Entry, name: str) -> int:
        """Return a run to a state; returns where in its sequence it stands then.

        Errors: RESOURCE_UNKNOWN, CHECKSUM_MISMATCH, NOT_READY.
        """
        info = self._states.find(entry.run.run_id, name)
        content = self._states.read(info)
        entry.run.restore(content)
        # The run stands there, and its sequence does not yet: without the rest of this call it has no place.
        with entry.run.changing():
            # Only now: what cannot be restored must not be what the next process begins with.
            self._states.touch(entry.run.run_id, info)
            entry.states = self._states.list(entry.run.run_id)
        return int(content.meta["applied_seq_id"])

    def _open(self, run_id: str, spec: RunSpec) -> Entry:
        found = self._states.newest_sound(run_id)
        if found is not None:
            held = held_spec(found[0], found[1].meta)
            if not extends(held, spec):
                check_same(run_id, held, spec, str(found[0].path))
        begins_with = self._begins_with(spec) if found is None else None
        run = self._make_run(run_id, spec)
        applied = 0
        try:
            if found is not None:
                applied = self._restore(run, *found)
                # What is newer is harmed, and not to be counted.
                if found[0].order == ORDER_LOST or found[0] != self._states.list(run_id)[-1]:
                    self._states.touch(run_id, found[0])
            elif begins_with is not None:
                run.begin(content := begins_with())
                fresh = spec.fresh_optimizer or not spec.initial_state
                log.info("run_begins_with", run_id=run_id, path=str(content.folder), fresh_optimizer=fresh)
            return Entry(run, Sequence(applied), run.status, self._states.list(run_id))
        except BaseException:
            # Not open, so not published either.
            run.close()
            release_memory()
            raise

    def _begins_with(self, spec: RunSpec) -> Callable[[], Content] | None:
        """What reads what a new run begins with, which is there; None where that is its base model alone."""
        if (folder := initial_adapter(spec)) is not None:
            return lambda: read_adapter(folder)
        if (state := initial_state(spec)) is not None:
            return lambda: self._states.read(state)
        return None

    def _restore(self, run: Run, info: StateInfo, content: Content) -> int:
        run.restore(content)
        applied = int(content.meta["applied_seq_id"])
        log.info("run_restored", run_id=run.run_id, state=info.name, applied_seq_id=applied)
        return applied


def _unknown(run_id: str) -> QuartetError:
    return QuartetError(
        "RUN_UNKNOWN",
        f"run {run_id!r} is not open here; call CreateRun, which also restores it",
        run_id=run_id,
    )
