"""Training: walks the run's list of calls (calls.py) and has every answer written down (answers.py).

1. Calls go out one at a time, in order; a call goes out only after the batch it needs and the answer to the
   call before are in the journal, on disk. So the trainer is never more than one call ahead, not even after a
   power cut.
2. A call whose answer is not written down is sent again under its own seq_id: the trainer applies it once at
   most.
3. A trainer that lost the run (RUN_UNKNOWN) or part of it (SEQUENCE_GAP) gets CreateRun, says where it
   stands, and is sent the calls after that again, their batches read back from the journal. Answers already
   written down are not written twice.
4. A trainer that is further than this journal ever asked was driven by somebody else: RunInterrupted, nothing
   is sent.
5. While nothing is asked of it the trainer is looked at every GUARD_S, because the weights it serves are
   needed then, too; and inference, whether it has come to them (keeping_up.py), also while a step is
   computed: that may take long.
6. A trainer that refuses a run with rollouts (another release, whose states or settings differ; a model
   folder that is not there any more) is RunInterrupted: what is there can be mended, the run is whole.
7. What replicas serve by the name of a run that has published nothing is an earlier run's, and is unloaded:
   it would answer in place of this one, and keep the replica from a whole model of that name.
8. A run that is to be opened, and that the trainer has no room for beside those that are open there, waits
   for its turn again (NoRoom), where there is a run here to wait for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial

from quartet.errors import QuartetError
from quartet.run.config import RunConfig
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1.rollout_pb2 import Rollout

from quartet_orchestrator import batches, closing
from quartet_orchestrator.answers import Answer, Answers, refused
from quartet_orchestrator.book import Book
from quartet_orchestrator.calls import Call, CallKind, CallPlan
from quartet_orchestrator.keeping_up import KeepingUp
from quartet_orchestrator.outage import Outage, RunInterrupted
from quartet_orchestrator.own_advantages import Remembered
from quartet_orchestrator.parts import Own
from quartet_orchestrator.specs import loss_spec, run_spec
from quartet_orchestrator.state import PENDING
from quartet_orchestrator.steps import Trained, of_calls
from quartet_orchestrator.trainer_client import TrainerClient

# How often an idle trainer is asked whether it still has the run.
GUARD_S = 2.0
# A trainer that loses the run this often without applying one call in between will not keep it.
MAX_RESTORES = 10


class NoRoom(Exception):
    """The trainer has as many runs open as it may, and one of this orchestrator's will make room."""


class Training:
    """What trains a run on Quartet's trainer."""

    #: Whether a step may be broken off: the trainer goes on with it.
    MAY_BREAK_OFF = False

    def __init__(
        self,
        book: Book,
        config: RunConfig,
        client: TrainerClient,
        outage: Outage,
        keeping_up: KeepingUp,
        unserve: Callable[[], Awaitable[None]],
        gives_way: Callable[[], bool],
        on_opened: Callable[[], None],
        on_published: Callable[[int, bytes], None],
        own: Own | None = None,
    ) -> None:
        """`unserve` has an adapter of the run's name unloaded; `gives_way` says whether the run waits for
        another one where the trainer has no room for it; `on_opened` is called once it is there,
        `on_published` as `Answers` says; `own` is what `advantage = "custom"` goes by."""
        self._unserve, self._gives_way, self._on_opened = unserve, gives_way, on_opened
        self._own = Remembered(own) if own is not None else None
        self._book = book
        self._config = config
        self._client = client
        self._outage = outage
        self._keeping_up = keeping_up
        self._plan = CallPlan.of(config, book.state.earlier_ends, book.state.earlier_saving)
        self._answers = Answers(book, self._plan, on_published)
        self._one_at_a_time = asyncio.Lock()
        # The next call to send; behind the book's applied_seq_id while a trainer is brought up again.
        self._next = 0
        self._restores = 0
        # Whether the trainer may have this run, because this process or one before it asked for it, and
        # whether it said so; not where it has somebody else's of that name.
        self._asked = book.state.phase != PENDING or book.state.applied_seq_id > 0
        self._opened = False
        # The rollouts of the batch that calls are being made of, by its number: read once for all of them.
        self._read: tuple[int, list[list[Rollout]]] | None = None
        # Of the end of the run, where the trainer did not answer to it.
        self._untold: int | None = None

    @property
    def troubles(self) -> list[str]:
        """What keeps it from training now, for a person."""
        keeping_up = self._keeping_up
        return [said for said in (self._outage.trouble, keeping_up.trouble, *keeping_up.refusing) if said]

    @property
    def replays(self) -> bool:
        """Whether the trainer does once more what it did, or no replica was found since that has come to what
        it published: their versions are older meanwhile."""
        if not self._next:
            return False
        return self._next <= self._book.state.applied_seq_id or self._keeping_up.is_due

    async def open(self) -> None:
        """Creates or finds the run on the trainer and brings it to where the book stands; version 0 is
        published. Raises NoRoom."""
        async with self._one_at_a_time:
            await self._restore(gives_way=True)
            if not self._book.state.applied_seq_id:
                await self._unserve()
            await self._through(max(self._plan.published_by(-1), self._book.state.applied_seq_id))

    async def close(self, *, goes_on: bool) -> None:
        """Frees what the trainer holds in memory for the run; one that is away is told by `closed`."""
        if self._asked:
            self._untold = await closing.close(self._book, self._client, goes_on=goes_on, opened=self._opened)

    async def closed(self) -> bool:
        """Returns once the trainer has heard of it; whether it had to be told anew."""
        if self._untold is None:
            return False
        await closing.at_last(self._book, self._client, self._untold)
        return True

    async def learn(self, batch: int) -> None:
        """Computes what comes out of a closed batch; the version before it stays the one published last."""
        async with self._one_at_a_time:
            await self._through(self._plan.published_by(batch) - 1)

    def has_published(self, batch: int) -> bool:
        """Whether the trainer said that it published that."""
        return self._book.state.applied_seq_id >= self._plan.published_by(batch)

    async def publish(self, batch: int) -> None:
        """Publishes the version that came out of it."""
        async with self._one_at_a_time:
            await self._through(self._plan.published_by(batch))

    async def save(self, batch: int) -> None:
        """Saves the state after a batch where the plan says so; after the last one, exports the model."""
        async with self._one_at_a_time:
            await self._through(self._plan.last_of(batch))

    async def trained(self, batch: int) -> Trained:
        """What the trainer said of a batch, and how many versions came out different when they were published
        again, since it was asked last."""
        found = await asyncio.to_thread(of_calls, self._book, self._config, batch)
        count = self._answers.take_versions_changed()
        changed = {"train/versions_changed": float(count)}
        return replace(found, metrics={**found.metrics, **changed}, own=self._own)

    @property
    def first_digest(self) -> bytes | None:
        """Of version 0, while nothing later can have been published; empty where it was not published to this
        process, None where something later may have been."""
        return self._answers.first_digest

    async def guard(self) -> None:
        """For ever: a trainer that lost the run is brought up again without being asked to train."""
        while True:
            await asyncio.sleep(GUARD_S)
            if not self._one_at_a_time.locked():
                await self._see_to_it()
            is_up = self._opened and self._next > self._book.state.applied_seq_id
            if is_up and not self._outage.trouble:
                await self._keeping_up.look(self._book.state.step * self._config.versions_per_step)

    async def _see_to_it(self) -> None:
        """Has it brought up again where it lost the run."""
        async with self._one_at_a_time:
            try:
                await self._outage.through(lambda: self._client.get(self._book.state.run_id))
            except QuartetError as error:
                if error.reason != "RUN_UNKNOWN":
                    raise
                await self._restore()
                await self._through(self._book.state.applied_seq_id)
                self._restores = 0  # no call is due, so that there is no progress to make

    async def _restore(self, *, gives_way: bool = False) -> None:
        """Has the trainer open the run; the next call is the one after those that it has applied. Only a run
        that gives way raises NoRoom."""
        run_id = self._book.state.run_id
        spec = run_spec(self._config, self._book.state.earlier_ends)
        self._restores += 1
        if self._restores > MAX_RESTORES:
            raise RunInterrupted(
                f"the trainer lost run {run_id!r} {MAX_RESTORES} times without progress; see its log, mend "
                "that, then resume the run"
            )
        # Before it answers: whoever stops waiting leaves a trainer that finishes what it began.
        self._asked, self._opened = True, False
        try:
            there = await self._outage.through(partial(self._create, run_id, spec, gives_way))
        except NoRoom:
            self._asked, self._restores = False, 0
            self._outage.answered()
            raise
        except QuartetError as error:
            self._asked = False
            if not (self._book.state.dispatched_in_part or self._book.state.groups):
                raise  # there is no rollout to keep: it begins again when it is resumed
            remedy = "mend that there, or start the release that it was, then resume the run"
            raise RunInterrupted(
                f"the trainer refuses the run that it had: {error.message}; {remedy}"
            ) from error
        written = self._book.state.applied_seq_id
        if closing.is_ahead(there, written):
            self._asked = False
            raise RunInterrupted(
                f"the trainer's run {run_id!r} stands at call {there.applied_seq_id}, but this "
                f"orchestrator asked for {written + 1} at most; choose another run_id, "
                "or empty the trainer's folder of states and resume the run"
            )
        if there.applied_seq_id < written:
            self._book.note(
                f"the trainer is back at policy version {there.policy_version}, its newest state; calls "
                f"{there.applied_seq_id + 1} to {written}, which it did since, are done once more from the "
                "journal"
            )
        self._opened = True
        self._on_opened()
        self._keeping_up.interrupted()
        self._next = min(there.applied_seq_id, written) + 1

    async def _create(self, run_id: str, spec: tpb.RunSpec, gives_way: bool) -> tpb.RunState:
        try:
            with self._outage.calling():
                return await self._client.create(run_id, spec, self._config.ckpt.keep_last)
        except QuartetError as error:
            if gives_way and "max_runs" in error.metadata and self._gives_way():
                raise NoRoom from error
            raise

    async def _through(self, last: int) -> None:
        """Sends the calls up to that one, from the next on."""
        while self._next <= last:
            call = self._plan.call(self._next)
            try:
                answer = await self._outage.through(partial(self._send, call))
            except QuartetError as error:
                if error.reason not in ("RUN_UNKNOWN", "SEQUENCE_GAP"):
                    raise refused(call, error) from error
                await self._restore()
                continue
            self._answers.take(call, answer)
            self._next = call.seq_id + 1
            self._restores = 0

    async def _send(self, call: Call) -> Answer:
        run_id = self._book.state.run_id
        await self._book.settled()
        has_batch = call.kind == CallKind.FORWARD_BACKWARD
        frames = await asyncio.to_thread(self._frames, call) if has_batch else iter(())
        with self._outage.calling():
            match call.kind:
                case CallKind.FORWARD_BACKWARD:
                    return await self._client.forward_backward(frames)
                case CallKind.OPTIM_STEP:
                    return await self._client.optim_step(run_id, call.seq_id)
                case CallKind.PUBLISH:
                    return await self._client.publish(run_id, call.seq_id)
                case CallKind.SAVE:
                    return await self._save(run_id, call)

    async def _save(self, run_id: str, call: Call) -> tpb.SaveStateResponse:
        try:
            return await self._client.save(
                run_id, call.seq_id, call.state_name, export_model=call.export_model, keep=call.keep
            )
        except QuartetError as error:
            if error.reason != "SEQUENCE_CONFLICT":
                raise
            # The trainer died between saving and answering, and came back from this very state.
            for state in await self._client.states(run_id):
                if state.seq_id == call.seq_id and state.name == call.state_name:
                    return tpb.SaveStateResponse(state=state)
            raise

    def _frames(self, call: Call) -> Iterator[tpb.ForwardBackwardRequest]:
        groups = self._groups(call)
        rollouts, advantages = batches.credited(self._config.algorithm, groups, call.minibatch, self._own)
        start = tpb.ForwardBackwardStart(
            run_id=self._book.state.run_id,
            seq_id=call.seq_id,
            loss=loss_spec(
                self._config,
                call.batch,
                call.iteration * self._config.algorithm.num_minibatches + call.minibatch,
            ),
            normalizer=batches.normalizer(
                self._config, rollouts, minibatches=self._config.algorithm.num_minibatches
            ),
            # Later passes would find what the first one found.
            verify_logprobs=self._config.checks.verify_logprobs and call.iteration == 0,
        )
        return batches.frames(start, rollouts, advantages)

    def _groups(self, call: Call) -> list[list[Rollout]]:
        """The rollouts of the call's batch. Raises RunInterrupted."""
        if self._read is not None and self._read[0] == call.batch:
            groups = self._read[1]
        else:
            closed = self._book.closed_batch(call.batch)
            groups = [self._book.rollouts(group) for group in closed.groups]
            if any(not rollout.samples for group in groups for rollout in group):
                raise RunInterrupted(
                    f"the trainer stands before step {call.batch + 1}, whose rollouts were given up "
                    "(journal_keep_bytes): put its saved states back and resume the run, or submit a new one"
                )
        algorithm = self._config.algorithm
        passes, parts = algorithm.num_iterations, algorithm.num_minibatches
        is_last = (call.iteration, call.minibatch) == (passes - 1, parts - 1)
        self._read = None if is_last else (call.batch, groups)
        return groups
