"""Training elsewhere: hands each closed batch to the program that trains it, and waits for what comes of it.

1. The groups of a batch are handed out when it is on disk, all of the batch before are acknowledged and a
   replica serves the version that came of it: so the version of batch s is s + 1, as docs/staleness.md needs
   it.
2. A group is sent once on each stream until it is acknowledged. That is written down, and from then on it is
   sent to nobody. (An acknowledgement that was lost on the way is asked for by sending the group again.)
   What was sent to nobody cannot be acknowledged.
3. Each group that is sent costs a credit.
4. One stream is served at a time, the newest: a client that came back after its connection broke has not to
   wait until the broken one is noticed.
5. A trainer that is away for longer than `patience_s` stops the run, resumable. Time in which this process
   did not run itself is none of it (quartet.kit.awake).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

from quartet.errors import QuartetError, refused
from quartet.kit.awake import awake_s
from quartet.kit.news import News
from quartet.run.config import RunConfig
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.journal_pb2 import BatchClosed

from quartet_orchestrator.batches import credited, normalizer
from quartet_orchestrator.book import Book
from quartet_orchestrator.outage import AWAY, LOCKED_OUT, NOTE_AFTER_S, RunInterrupted
from quartet_orchestrator.own_advantages import Remembered
from quartet_orchestrator.parts import Own
from quartet_orchestrator.state import Group
from quartet_orchestrator.steps import Trained, of_acks

# How soon a version that was pushed is noticed, and an absence.
LOOK_S = 0.25
# More groups than any run has in a batch: a client that grants more means "all", or counts wrongly.
MAX_CREDITS = 1 << 20
# Of a replica that is asked what it serves: what a look later may be over. A fault may pass, too.
PASSING = AWAY | {LOCKED_OUT, "INTERNAL"}


@dataclass(frozen=True)
class HandedOut:
    """A closed batch; what its loss is divided by, and by group and member the advantages of what is trained
    on of it."""

    closed: BatchClosed
    normalizer: float
    credit: dict[int, dict[int, list[float]]]


@dataclass(frozen=True)
class Over:
    """Nothing is handed out any more."""

    #: None where all is trained.
    why: QuartetError | None


class ForeignTraining:
    """What stands in for Training where another program trains the run."""

    #: Whether a step may be broken off: nothing of it is here but what the book says.
    MAY_BREAK_OFF = True
    #: As Training has it: what it does again is its own affair.
    replays = False
    #: Of version 0, as Training has it: who pushes it knows what it is, and whether a later one is there.
    first_digest = None

    def __init__(
        self,
        book: Book,
        config: RunConfig,
        serving: Callable[[int], Awaitable[None]],
        patience_s: float,
        own: Own | None = None,
    ) -> None:
        """`serving` raises where no replica serves a version; `own` is what algorithm.advantage = "custom"
        goes by."""
        self._own = Remembered(own) if own is not None else None
        self._book = book
        self._config = config
        self._serving = serving
        self._patience_s = patience_s
        self._stream: RolloutStream | None = None
        self._away_since = awake_s()
        self._batch = HandedOut(BatchClosed(), 0.0, {})
        # The groups that were sent, and those that whoever handed them out before may have sent.
        self._sent = {number for closed in book.state.batches.values() for number in closed.groups}
        # Why no replica serves the version that is waited for.
        self._unserved = ""
        self.news = News()
        self.over: Over | None = None

    @property
    def troubles(self) -> list[str]:
        """What keeps it from being trained now, for a person."""
        if self._stream is not None or not (self._unserved or self.waiting()):
            return [self._unserved] if self._unserved else []
        away_s = awake_s() - self._away_since
        return [
            f"no trainer calls StreamRollouts of it for {away_s:.0f} s; start it, or the run stops, "
            f"resumable, after patience_seconds = {self._patience_s:g}"
        ]

    async def open(self) -> None:
        """The trainer comes by itself. Returns once a replica serves the version that the book stands at."""
        self._away_since = awake_s()
        await self._served(self._book.state.step)

    async def close(self, *, goes_on: bool) -> None:
        """Ends the stream: without an error where all is trained for good, else with RUN_NOT_SERVED."""
        run_id, done = self._book.state.run_id, self._book.state.step == self._config.max_steps
        if done and not goes_on:
            self.over = Over(None)
        else:
            why = f"run {run_id!r} is stopped or has failed, see its status; resume it, or submit a new one"
            self.over = Over(QuartetError("RUN_NOT_SERVED", why, want=run_id))
        self.news.tell()

    async def closed(self) -> bool:
        """Its trainer is told as soon as it calls."""
        return False

    def break_off(self) -> None:
        """Ends the stream of a run that goes on at once: its client is to call again."""
        self.over = Over(
            QuartetError(
                "NOT_READY", f"run {self._book.state.run_id!r} goes on with other settings; call again"
            )
        )
        self.news.tell()

    async def learn(self, batch: int) -> None:
        """Whoever learns publishes too, when it likes: all of it is `publish`."""

    def has_published(self, batch: int) -> bool:
        """Whether all of the batch is acknowledged, and its version pushed or on its way."""
        groups, closed = self._book.state.groups, self._book.state.batches.get(batch)
        return closed is not None and all(groups[number].acked for number in closed.groups)

    async def publish(self, batch: int) -> None:
        """Hands a closed batch out; returns once it is trained on and its version served."""
        # Its trainer goes on with what it was sent, whatever becomes of this machine.
        await self._book.settled()
        closed = self._book.closed_batch(batch)
        self._batch = await asyncio.to_thread(_handed_out, self._book, self._config, closed, self._own)
        self.news.tell()
        while self.waiting():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.news.wait()
            self._check_patience()
        await self._served(batch + 1)

    async def save(self, batch: int) -> None:
        """What it trained is the trainer's own to keep."""

    async def guard(self) -> None:
        """Waits for ever: `open` and `publish` notice by themselves that the trainer is away."""
        await asyncio.Event().wait()

    async def trained(self, batch: int) -> Trained:
        """When a batch was trained, as its acknowledgements tell it; there are no metrics."""
        return replace(await asyncio.to_thread(of_acks, self._book, batch), own=self._own)

    def stream(self) -> RolloutStream:
        """A new one, which takes over."""
        self._stream = RolloutStream(self, self._book)
        self.news.tell()
        return self._stream

    def left(self, stream: RolloutStream) -> None:
        """A stream has ended. If it was the newest one, the trainer is away from now on."""
        if stream is self._stream:
            self._stream, self._away_since = None, awake_s()

    def serves(self, stream: RolloutStream) -> bool:
        """Whether the stream is the newest one."""
        return stream is self._stream

    def waiting(self) -> list[Group]:
        """The groups that are handed out and not acknowledged."""
        groups = self._book.state.groups
        numbers = self._batch.closed.groups
        return [groups[number] for number in numbers if number in groups and not groups[number].acked]

    def acknowledge(self, number: int) -> None:
        """A group that was sent; also one that an orchestrator before this one may have sent."""
        state = self._book.state
        group = state.groups.get(number)
        if number < state.next_group and (group is None or group.acked):
            return  # told again
        if number not in self._sent:
            raise refused("ack", number, "acknowledge groups that were sent, by their number")
        try:
            self._book.write(acked={"group": number})
        except OSError as error:
            raise QuartetError("NOT_READY", f"group {number} cannot be written down: {error}") from error
        self._sent.discard(number)
        self.news.tell()

    def reader(self, group: Group) -> Callable[[], list[pb.StreamRolloutsResponse]]:
        """What reads the group as it is sent, which it is from now on: meant for a thread."""
        self._sent.add(group.number)
        # The batch of now: it may be trained on while the thread reads.
        return partial(_frames, self._book, self._batch, group.number)

    async def _served(self, steps: int) -> None:
        version, since, noted = steps * self._config.versions_per_step, awake_s(), False
        try:
            while True:
                try:
                    return await self._serving(version)
                except QuartetError as error:
                    if error.reason not in PASSING:
                        raise
                    self._unserved = f"waits until its trainer has pushed version {version}: {error.message}"
                    if not noted and awake_s() - since > NOTE_AFTER_S:
                        noted = True
                        self._book.note(self._unserved)
                self._check_patience()
                await asyncio.sleep(LOOK_S)
        finally:
            self._unserved = ""

    def _check_patience(self) -> None:
        away_s = awake_s() - self._away_since
        if self._stream is None and away_s > self._patience_s:
            raise RunInterrupted(
                f"no trainer has called StreamRollouts for {away_s:.0f} s (patience_seconds = "
                f"{self._patience_s:g}); start it again, then resume the run"
            )


class RolloutStream:
    """One client's call."""

    def __init__(self, training: ForeignTraining, book: Book) -> None:
        self._training = training
        self._book = book
        self._credits = 0
        self._sent: set[int] = set()

    async def responses(
        self, requests: AsyncIterator[pb.StreamRolloutsRequest]
    ) -> AsyncGenerator[pb.StreamRolloutsResponse, None]:
        """Raises QuartetError."""
        self._listening = asyncio.create_task(self._listen(requests))
        self._listening.add_done_callback(lambda _: self._training.news.tell())
        try:
            while (group := await self._next()) is not None:
                for frame in await asyncio.to_thread(self._training.reader(group)):
                    yield frame
        finally:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
            self._training.left(self)

    async def _next(self) -> Group | None:
        """The next group to be sent; None at the end."""
        while True:
            news = self._training.news.next
            if not self._training.serves(self):
                raise QuartetError(
                    "RUN_CONFLICT",
                    f"another StreamRollouts of run {self._book.state.run_id!r} took over",
                    run_id=self._book.state.run_id,
                )
            if self._training.over is not None:
                if self._training.over.why is not None:
                    raise copy(self._training.over.why)
                return None
            if self._listening.done():
                # It raises what the client said wrong; else the client has ended its side.
                return self._listening.result()
            waiting = {group.number: group for group in self._training.waiting()}
            self._sent &= waiting.keys()
            unsent = [number for number in waiting if number not in self._sent]
            if self._credits and unsent:
                self._credits -= 1
                self._sent.add(unsent[0])
                return waiting[unsent[0]]
            await news.wait()

    async def _listen(self, requests: AsyncIterator[pb.StreamRolloutsRequest]) -> None:
        async for request in requests:
            if not self._training.serves(self):
                return  # the one that took over is told everything again
            self._told(request)

    def _told(self, request: pb.StreamRolloutsRequest) -> None:
        match request.WhichOneof("frame"):
            case "credits" if self._credits + request.credits <= MAX_CREDITS:
                self._credits += request.credits
                self._training.news.tell()
            case "credits":
                raise refused("credits", request.credits, f"grant at most {MAX_CREDITS} groups at once")
            case "ack":
                self._training.acknowledge(request.ack)
            case frame:
                raise refused("frame", frame, "send start once, then credits and ack")


def _frames(book: Book, batch: HandedOut, number: int) -> list[pb.StreamRolloutsResponse]:
    credit = batch.credit[number]
    rollouts = [one for one in book.rollouts(number) if one.member in credit]
    head = pb.CreditedGroup(
        group=number,
        step=batch.closed.batch + 1,
        groups_of_step=len(batch.closed.groups),
        rollouts=len(rollouts),
        normalizer=batch.normalizer,
    )
    bodies = (pb.CreditedRollout(rollout=one, advantages=credit[one.member]) for one in rollouts)
    return [
        pb.StreamRolloutsResponse(group=head),
        *(pb.StreamRolloutsResponse(rollout=body) for body in bodies),
    ]


def _handed_out(book: Book, config: RunConfig, closed: BatchClosed, own: Own | None) -> HandedOut:
    """Reads the rollouts of the batch: meant for a thread."""
    groups = [book.rollouts(number) for number in closed.groups]
    owners = {id(one): number for number, group in zip(closed.groups, groups, strict=True) for one in group}
    found: dict[int, dict[int, list[float]]] = {number: {} for number in closed.groups}
    rollouts, advantages = credited(config.algorithm, groups, own=own)
    for rollout, its_own in zip(rollouts, advantages, strict=True):
        found[owners[id(rollout)]][rollout.member] = its_own
    return HandedOut(closed, normalizer(config, rollouts), found)
