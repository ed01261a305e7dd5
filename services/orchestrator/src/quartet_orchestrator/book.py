"""The book of a run: its journal, the state folded from it, and those who wait for news.

1. `write` appends, folds and wakes in one go; no other code runs in between, so nobody acts on what is not
   written down. What the state would not take is not appended: a fault of ours ends the run, and not its
   journal.
2. `settled` returns once everything written so far survives a power cut, too.
3. Whoever follows `events` gets every event exactly once, in order, without gaps, also over a restart.
4. The book of a run that rests holds nothing open but for as long as somebody reads it; nor does one leave
   anything open who stops waiting.

Appending hands a few KiB to the page cache and one row to SQLite (tens of microseconds), on the event loop,
because that is what makes 1 simple; syncing to the disk happens in a thread, but for what a full segment has
not had synced yet, once in SEGMENT_BYTES, for SQLite's checkpoints, once in some hundred rows, and for the
rows of a segment that was compacted: a third of a second for 36,000 records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import structlog
from quartet.errors import QuartetError
from quartet.kit.news import News
from quartet.run.learning import CheckpointConfig
from quartet.v1 import journal_pb2 as jpb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2
from quartet.v1.envhost_service_pb2 import EnvironmentInfo

from quartet_orchestrator.journal import Journal
from quartet_orchestrator.segments import JournalCorrupt
from quartet_orchestrator.state import PENDING, RESTING, RunState

log = structlog.get_logger()

#: When it is asked again to rest where a thread is at it.
REST_AGAIN_S = 0.1

Params = ParamSpec("Params")
Result = TypeVar("Result")

# Events read from the journal at once: bounds the memory of a follower that starts from the beginning.
PAGE = 64


class Book:
    """Raises JournalCorrupt or OSError where the journal cannot be opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = Journal(folder)
        self.state = RunState()
        self._news = News()
        # Why the last write failed; empty where it did not.
        self._blocked = ""
        # On the monotonic clock: the last record that was more than a remark, or what somebody measured.
        self.moved_at = time.monotonic()
        # When this part of the run began, Unix time: what this process wrote first, or went on with later.
        self.part_began_at_ms = 0
        try:
            self._fold()
        except BaseException:
            self.journal.close()
            raise
        self.rest_if_idle()

    def _fold(self) -> None:
        number = 0
        try:
            for record in self.journal.without_rollouts():
                number = record.number
                self.state.apply(record)
            # Groups that are still open need to know which of their members are done.
            for group in list(self.state.groups):
                for record in self.journal.select("rollout", group=group):
                    number = record.number
                    self.state.apply(record)
        except (AssertionError, KeyError) as error:
            raise JournalCorrupt(
                f"record {number} does not follow from those before it: {error!r}"
            ) from error
        if self.journal.torn_bytes and self.state.run_id:
            with suppress(OSError):  # a full disk keeps nobody from reading what was
                self.note(
                    f"the journal ended in {self.journal.torn_bytes} torn bytes, which were cut off; "
                    "what they held happens again",
                    warning=True,
                )

    def write(self, **kind: Any) -> jpb.JournalRecord:
        """Appends one record, e.g. write(note=NoteEvent(...)). Raises OSError, or AssertionError where it
        does not follow; then nothing was written."""
        record = jpb.JournalRecord(**kind)
        self.state.check(record)
        try:
            self.journal.append(record)
        except OSError as error:
            self._blocked = str(error)
            self._news.tell()
            raise
        self._blocked = ""
        if "note" not in kind:
            self.moved()
        self.state.apply(record)
        if not self.part_began_at_ms or record.phase.run.phase == PENDING:
            self.part_began_at_ms = record.at_ms
        self._news.tell()
        return record

    def moved(self) -> None:
        """The run did something that counts."""
        self.moved_at = time.monotonic()

    def note(self, message: str, *, warning: bool = False) -> None:
        """Tells people something, in the log and as an event. Raises OSError; then it is in the log alone."""
        level = pb.NOTE_LEVEL_WARNING if warning else pb.NOTE_LEVEL_INFO
        (log.warning if warning else log.info)(message, run_id=self.state.run_id)
        self.write(note=pb.NoteEvent(level=level, message=message))

    def enter(self, phase: pb.RunPhase, *, error: str = "") -> None:
        """Changes the phase; nothing where the run is in it already."""
        if phase == self.state.phase and error == self.state.error:
            return
        run = self.run()
        run.phase, run.error, run.last_event = phase, error, self.journal.last_event + 1
        run.ledger.CopyFrom(self.state.ledger_after(phase).to_proto())
        self.write(phase=pb.PhaseEvent(run=run))

    def extend(self, config_toml: str, max_steps: int) -> None:
        """Begins another part of a COMPLETED run, which has more steps."""
        run = self.run()
        run.phase, run.config_toml, run.max_steps = PENDING, config_toml, max_steps
        for rewarded in (run, *run.agents):
            rewarded.ClearField("reward_after")
        run.ClearField("model_path")
        run.last_event = self.journal.last_event + 1
        self.write(phase=pb.PhaseEvent(run=run))

    def change(self, config_toml: str, before: CheckpointConfig, message: str) -> None:
        """The run is carried out otherwise from here on, and people are told how; `before` is when it saved
        its state until here. Without config_toml that comes with `extend`."""
        log.info(message, run_id=self.state.run_id)
        self.write(
            changed={
                "config_toml": config_toml,
                "ckpt_interval": before.interval,
                "ckpt_keep_last": before.keep_last,
                "ckpt_keep_interval": before.keep_interval or 0,
                "note": pb.NoteEvent(level=pb.NOTE_LEVEL_INFO, message=message),
            }
        )

    def meet(self, places: Sequence[int], found: EnvironmentInfo, host: str, note: pb.NoteEvent) -> None:
        """A host has another environment than the run met at these places before, and people are told."""
        (log.warning if note.level == pb.NOTE_LEVEL_WARNING else log.info)(
            note.message, run_id=self.state.run_id
        )
        self.write(met={"places": places, "environment": found, "host": host, "note": note})

    def run(self) -> pb.Run:
        """The run as callers get it."""
        return self.state.to_proto(self.journal.last_event)

    def rollouts(self, group: int) -> list[rollout_pb2.Rollout]:
        """The group's rollouts that succeeded, by member."""
        good = [rollout for rollout in self.attempts(group) if not rollout.HasField("failure")]
        return sorted(good, key=lambda rollout: rollout.member)

    def attempts(self, group: int) -> list[rollout_pb2.Rollout]:
        """All of the group's rollouts, well or not, as they ended."""
        return [record.rollout.rollout for record in self.journal.select("rollout", group=group)]

    def closed_batch(self, batch: int) -> jpb.BatchClosed:
        """What was written down when the batch was closed; also after it was trained."""
        (record,) = self.journal.select("batch", step=batch + 1)
        return record.batch

    async def settled(self) -> None:
        """Returns once everything written so far survives a power cut. Raises OSError."""
        await self._in_thread(self.journal.syncer())

    @property
    def waits(self) -> str:
        """What its journal waits for, for a person; empty where the last write went well."""
        return f"waits for its journal: {self._blocked}" if self._blocked else ""

    async def changed(self) -> None:
        """Returns after the next write."""
        await self._news.wait()

    async def events(self, after: int, *, rollouts: bool) -> AsyncGenerator[jpb.JournalRecord, None]:
        """All events after one, then new ones until the run rests and everything was said. Raises NOT_READY
        once there is nothing to say because the journal cannot be written."""
        try:
            while True:
                news, resting, last = self._news.next, self.state.phase in RESTING, self.journal.last_event
                page: list[jpb.JournalRecord] = []
                if after < last:
                    page = await self._in_thread(self.journal.events, after, PAGE, rollouts=rollouts)
                for record in page:
                    after = record.event
                    yield record
                if page:
                    continue
                after = max(after, last)  # the rest were rollouts nobody asked for
                if last == self.journal.last_event:
                    if resting:
                        return
                    if self.waits:
                        raise QuartetError("NOT_READY", f"the run {self.waits}")
                    await news.wait()
        finally:
            self.rest_if_idle()

    async def opened(self) -> None:
        """Returns with the book open, to be written. Raises JournalCorrupt or OSError."""
        while not self.journal.is_open:  # somebody may close it again before this goes on
            await self._in_thread(self.journal.wake)

    async def _in_thread(
        self, work: Callable[Params, Result], *args: Params.args, **named: Params.kwargs
    ) -> Result:
        """What comes of work that holds a descriptor, or opens the journal: done to its end, also where
        nobody waits for it any longer."""
        working = asyncio.create_task(asyncio.to_thread(work, *args, **named))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            working.add_done_callback(lambda _: self.rest_if_idle())
            raise

    def rest_if_idle(self) -> None:
        """Called by whoever has done with it; others who still read it open it again."""
        if self.state.phase in RESTING and not self.journal.rest():
            asyncio.get_running_loop().call_later(REST_AGAIN_S, self.rest_if_idle)

    def close(self) -> None:
        """Closes the journal for good: whoever reads it afterwards gets OSError."""
        self.journal.close()
