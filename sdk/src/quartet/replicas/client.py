"""Replicas: `generate` and `complete`, whatever becomes of a single replica.

1. Every call ends by its timeout, with what it asked for or with QuartetError; when it is cancelled or its
   iterator closed, the replica is told at once.
2. A replica that dies, drains, freezes or refuses is left for the next one; what had arrived stays, and is
   gone on from (generation.py). Nothing is delivered twice.
3. A round asks each replica in service at most once; between two rounds there is a growing, jittered pause.
   Rounds without a new token are bounded by the budget; while no replica is in service none is spent.
4. A replica to which the weights that are waited for cannot come is left for one that may have them; where
   that is none, another one is looked at every HELD_UP_SECONDS.
5. What another replica would refuse as well (a malformed request, a prompt that is too long, a fault of the
   service) is raised at once. A version or run that one replica does not serve is asked of each other once.
6. Completions for which a replica has no room together, now or ever, are asked for each by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pydantic

from quartet.config import Config
from quartet.errors import DEFAULT_RETRY_AFTER_MS, QuartetError
from quartet.inference import TOO_MANY
from quartet.kit import context as request_context
from quartet.kit.call import RetryBudget, stream
from quartet.kit.channel import ClientSecurity
from quartet.kit.stream import IDLE_TIMEOUT_SECONDS
from quartet.replicas.addresses import Addresses
from quartet.replicas.answer import Answer, Generated
from quartet.replicas.fleet import Fleet
from quartet.replicas.generation import Generation, Lane
from quartet.replicas.merge import merged
from quartet.replicas.replica import Replica, State, lost
from quartet.v1 import inference_service_pb2 as pb
from quartet.wanted import Wanted, wanted

# Refused here, perhaps not there: each replica is asked once.
ELSEWHERE: Final = frozenset({"VERSION_UNAVAILABLE", "RUN_NOT_SERVED"})
# All are held up where the trainer is away: whoever waits does not run from one to the other, nor stays with
# the one that is reached again last.
HELD_UP_SECONDS: Final = 30.0
# What a replica may answer before the caller's own deadline because that is near: not worth another round,
# nor another replica.
LAST_MOMENT_SECONDS: Final = 0.5
# In so little time nobody answers; gRPC ends a call up to a millisecond before its deadline.
NO_TIME_SECONDS: Final = 0.01
# Where none is in service, a person is told of so many.
SAID_OF: Final = 4


class Settings(Config):
    """How patient the client is."""

    # Heartbeats come every 5 s: a replica that is silent for so long is frozen, or the way to it is.
    idle_timeout_seconds: float = pydantic.Field(default=IDLE_TIMEOUT_SECONDS, gt=0)
    # How often "dns:///" names are looked up again.
    resolve_seconds: float = pydantic.Field(default=5.0, gt=0)
    # Rounds without a new token. About ten minutes: a caller's own deadline ends it sooner.
    rounds: RetryBudget = RetryBudget(max_attempts=300, initial_backoff_s=0.1, max_backoff_s=2.0)


@dataclass
class Counts:
    """What happened since the start."""

    # Calls that were continued elsewhere, and the tokens that they had by then.
    carried_on: int = 0
    carried_tokens: int = 0


@dataclass(eq=False)
class _Call:
    """One call under way."""

    wanted: Wanted
    waits_for: str = ""


class Replicas:
    """A client of the inference tier. Use as an async context manager, on one event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        security: ClientSecurity | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Replicas at "host:port" or "dns:///name:port". Raises ConfigError; connects when it is entered."""
        self._security = security or ClientSecurity()
        self._settings = settings or Settings()
        self._fleet = Fleet(Addresses(addresses, self._security), self._settings.resolve_seconds)
        self._given = tuple(addresses)
        self._calls: set[_Call] = set()
        self.counts = Counts()

    async def __aenter__(self) -> Replicas:
        """Connect to whoever is there."""
        await self._fleet.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close every channel; generations still under way are cancelled."""
        await self._fleet.__aexit__(*exc)

    @property
    def in_service(self) -> list[str]:
        """Addresses of the replicas that would be asked now."""
        return [one.address for one in self._fleet.in_service()]

    @contextmanager
    def stubs(self) -> Iterator[dict[str, Any]]:
        """InferenceService of each replica that is known, in service or not, by its address: for what is
        asked of one of them, or of all. None that leaves is closed while inside."""
        with ExitStack() as stack:
            for one in (known := self._fleet.replicas):
                stack.enter_context(one.carrying(1))
            yield {one.address: one.stub for one in known}

    @property
    def out_of_reach(self) -> str:
        """Why nobody can be asked now; empty where somebody can, or has not said anything yet."""
        if any(one.state is not State.OUT for one in self._fleet.replicas):
            return ""
        return f"no replica of inference is in service ({self._whereabouts()})"

    @property
    def waiting(self) -> dict[Wanted, str]:
        """What replicas say that calls under way wait for, by the weights that those name."""
        return {call.wanted: call.waits_for for call in self._calls if call.waits_for}

    def _whereabouts(self) -> str:
        """How each replica stands, or by which names none was found."""
        said = [f"{one.address}: {one.why or 'has not answered yet'}" for one in self._fleet.replicas]
        said = said or [f"{name}: none is known" for name in self._given]
        more = f" and {len(said) - SAID_OF} more" if len(said) > SAID_OF else ""
        return f"{'; '.join(said[:SAID_OF])}{more}"

    async def follow(self, addresses: Sequence[str]) -> None:
        """Replace the addresses; what a replica that leaves has in flight ends there. Raises ConfigError."""
        await self._fleet.follow(Addresses(addresses, self._security))
        self._given = tuple(addresses)

    def generate(
        self, request: pb.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The frames of an answer: one start, deltas, one finish for each completion; no heartbeats.

        Frames are the caller's own. Raises QuartetError. Whoever leaves the iterator early closes it
        (`contextlib.aclosing`), so that the replica is told at once.
        """
        return self._frames(Generation(request), timeout_s)

    def _frames(self, generation: Generation, timeout_s: float) -> AsyncGenerator[pb.GenerateResponse, None]:
        deadline = time.monotonic() + (request_context.bounded(timeout_s) or 0.0)
        return self._sample(generation, generation.lanes, deadline)

    async def complete(self, request: pb.GenerateRequest, timeout_s: float) -> Generated:
        """The whole answer. Raises QuartetError."""
        answer = Answer(request)
        async with aclosing(self._ended(request, timeout_s, answer)) as indices:
            async for _ in indices:
                pass
        return answer.so_far

    async def as_completed(
        self, request: pb.GenerateRequest, timeout_s: float
    ) -> AsyncGenerator[tuple[int, Generated], None]:
        """Each completion when it has ended, by itself, with its index. As `generate` otherwise."""
        answer = Answer(request)
        async with aclosing(self._ended(request, timeout_s, answer)) as indices:
            async for index in indices:
                yield index, answer.alone(index)

    async def _ended(
        self, request: pb.GenerateRequest, timeout_s: float, answer: Answer
    ) -> AsyncGenerator[int, None]:
        """The index of each completion that is whole in the answer."""
        generation = Generation(request)
        async with aclosing(self._frames(generation, timeout_s)) as frames:
            async for frame in frames:
                answer.take(frame)
                if frame.HasField("finish"):
                    index = frame.finish.index
                    assert generation.prompt_ids is not None, "a completion ended before its prompt was told"
                    answer.so_far.prompt_ids = generation.prompt_ids
                    answer.so_far.completions[index].replicas = generation.lanes[index].replicas
                    yield index

    async def _sample(
        self, generation: Generation, lanes: list[Lane], deadline: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """The frames of some lanes, from one replica after the other."""
        rounds = _Rounds(self._settings.rounds)
        while True:
            session_id = generation.request.session_id
            replica = await self._next(session_id, rounds, deadline)
            had = sum(len(lane.token_ids) for lane in lanes)
            failure: QuartetError | None = None
            try:
                async with aclosing(self._ask(replica, generation, lanes, deadline, rounds)) as frames:
                    async for frame in frames:
                        yield frame
            except QuartetError as error:
                failure = error
            left = [lane for lane in lanes if not lane.finished]
            if not left:
                return
            failure = failure or QuartetError("NOT_READY", "the answer ended before its last frame")
            # Where there is no room for all of them there may be for each.
            too_many = failure.metadata.get("field") == TOO_MANY and len(left) > 1
            if not too_many:
                rounds.note(replica, failure, progress=sum(len(lane.token_ids) for lane in lanes) > had)
            self._count(left)
            lanes = left
            crowded = too_many or (failure.reason == "OVERLOADED" and len(lanes) > 1)
            if crowded or not generation.may_be_together(lanes):
                break
        async with aclosing(merged([self._sample(generation, [lane], deadline) for lane in lanes])) as frames:
            async for frame in frames:
                yield frame

    async def _ask(
        self,
        replica: Replica,
        generation: Generation,
        lanes: list[Lane],
        deadline: float,
        rounds: _Rounds,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """One call."""
        began = time.monotonic()
        timeout_s = max(0.001, deadline - time.monotonic())
        with replica.carrying(len(lanes)), self._under_way(generation) as waiting:
            call = replica.stub.Generate(generation.ask(lanes), timeout=timeout_s)
            idle_s = self._settings.idle_timeout_seconds
            async with aclosing(stream(call, idle_timeout_s=idle_s)) as frames:  # type: ignore[type-var]
                async for frame in frames:
                    waiting.waits_for = frame.waits_for
                    if frame.held_up and self._may_leave(replica, rounds, began):
                        replica.note_held_up(frame.held_up)
                        text = f"{replica.address} waits for weights in vain: {frame.held_up}"
                        raise QuartetError("DEADLINE", text, waited_for="weights")
                    if generation.take(frame, lanes, replica.address):
                        yield frame

    @contextmanager
    def _under_way(self, generation: Generation) -> Iterator[_Call]:
        """While inside, a call; where its time ends it says what it waited for."""
        call = _Call(wanted(generation.request))
        self._calls.add(call)
        try:
            yield call
        except QuartetError as error:
            # gRPC's own, and no replica's, which says what it waited for itself.
            if error.reason != "DEADLINE" or "grpc_code" not in error.metadata or not call.waits_for:
                raise
            told = QuartetError("DEADLINE", f"{error.message}; it waited for {call.waits_for}")
            told.metadata = error.metadata
            raise told from error
        finally:
            self._calls.discard(call)

    def _may_leave(self, replica: Replica, rounds: _Rounds, began: float) -> bool:
        """Whether it is worth asking another one than this, which is held up."""
        others = self._fleet.in_service(but={replica.address, *rounds.refused})
        fresh = self._fleet.in_service(but={replica.address, *rounds.asked})
        return bool(fresh) or (bool(others) and time.monotonic() - began >= HELD_UP_SECONDS)

    async def _next(self, session_id: str, rounds: _Rounds, deadline: float) -> Replica:
        """The replica to ask now. Raises QuartetError."""
        if rounds.last is not None and deadline - time.monotonic() < NO_TIME_SECONDS:
            raise rounds.last  # which says why; another one could only say that the time is over
        if rounds.asked and not self._fleet.in_service(but=rounds.asked):
            await rounds.pause(self._fleet, deadline)
        # A caller's own clock may end its wait at this deadline: why nothing was sampled comes before.
        replica = await self._fleet.find(session_id, rounds.asked, deadline - LAST_MOMENT_SECONDS)
        if replica is None:
            raise self._nobody(rounds.last)
        return replica

    def _nobody(self, last: QuartetError | None) -> QuartetError:
        """The error where none came into service; `last`: of the one that was asked last, if one was."""
        text = f"no inference replica came into service before the deadline ({self._whereabouts()})"
        if last is None:
            return QuartetError("NOT_READY", text)
        text = f"{last.message}; after that {text}"
        error = QuartetError(last.reason, text, retry_after_ms=last.retry_after_ms)
        error.metadata = last.metadata
        return error

    def _count(self, lanes: Sequence[Lane]) -> None:
        tokens = sum(len(lane.token_ids) for lane in lanes)
        if tokens:
            self.counts.carried_on += 1
            self.counts.carried_tokens += tokens


class _Rounds:
    """What was asked of whom, and when to give up."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._fruitless = 0
        # By whom no later round will be answered.
        self.refused: set[str] = set()
        self._this_round: set[str] = set()
        self.last: QuartetError | None = None

    @property
    def asked(self) -> set[str]:
        """Replicas not to be asked again in this round, or at all."""
        return self._this_round | self.refused

    def note(self, replica: Replica, failure: QuartetError, *, progress: bool) -> None:
        """A call failed. Raises what no other replica would answer differently."""
        self.last = failure
        if progress:
            self._fruitless = 0
        if failure.reason == "OVERLOADED":
            replica.refused(failure.retry_after_ms or DEFAULT_RETRY_AFTER_MS)
        elif failure.reason in ELSEWHERE:
            self.refused.add(replica.address)
        elif lost(failure):
            replica.doubt(failure.message)
        elif failure.reason != "DEADLINE":
            raise failure
        self._this_round.add(replica.address)

    async def pause(self, fleet: Fleet, deadline: float) -> None:
        """The round is over: wait before the next one. Raises the last failure where there is none."""
        assert self.last is not None
        self._fruitless += 1
        nobody_left = bool(fleet.in_service()) and not fleet.in_service(but=self.refused)
        delay_s = self._budget.delay_s(self._fruitless, self.last)
        too_late = time.monotonic() + max(delay_s, LAST_MOMENT_SECONDS) >= deadline
        if nobody_left or too_late or self._fruitless >= self._budget.max_attempts:
            raise self.last
        await asyncio.sleep(delay_s)
        self._this_round.clear()
