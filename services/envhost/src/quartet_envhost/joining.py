"""The first turns of a group's members, asked for in one call.

The members of a group begin with one prompt. Sent, rendered and prefilled once, it costs each of them a
fraction of a call of its own: on the wire, and in both processes.

1. A member's answer is what it would have been alone: drawn with its own seed, and given to it as soon as its
   own completion ends.
2. Joined is only what a group's members ask first, and only where it is equal in everything but the seed; at
   most MAX_COMPLETIONS in one call.
3. Nobody waits for a member that has asked or has ended, nor for any longer than GATHER_SECONDS. Waited for
   are those that have begun, and of a group that is all in this worker those that are about to.
4. A member that stops waiting ends no other's completion; the call ends with the last one that waits.
5. A completion that the service fails at (INTERNAL), or cannot go on with for its structure, fails no other:
   what is left of the call is asked for once more, each by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Final

from quartet.errors import QuartetError
from quartet.inference import MAX_COMPLETIONS, STUCK
from quartet.kit import tracing
from quartet.replicas import Generated, Replicas
from quartet.v1.inference_service_pb2 import GenerateRequest

# Verifiers takes some milliseconds to begin each rollout; members that begin together ask within this time.
GATHER_SECONDS: Final = 0.05


class FirstTurns:
    """The groups whose members are under way in this worker."""

    def __init__(self, replicas: Replicas) -> None:
        """Ask these replicas."""
        self.replicas = replicas
        self._groups: dict[str, _Group] = {}

    @contextmanager
    def member(self, group: str, size: int = 1) -> Iterator[FirstTurn]:
        """While inside, a member of this group is under way, of which so many are in this worker."""
        known = self._groups.setdefault(group, _Group(self.replicas, size))
        known.members += 1
        first = FirstTurn(known)
        try:
            yield first
        finally:
            first.let_go()
            known.members -= 1
            if not known.members:
                del self._groups[group]


class FirstTurn:
    """One member's first turn, until it is asked for."""

    def __init__(self, group: _Group) -> None:
        """The group's other members may wait for it."""
        self._group = group
        self.pending = True
        group.expected += 1
        group.to_begin = max(0, group.to_begin - 1)

    async def complete(self, request: GenerateRequest, timeout_s: float) -> Generated:
        """The answer to it; asked for once. Raises QuartetError."""
        answered = self._group.ask(request, timeout_s)
        self.let_go()
        return await answered

    def let_go(self) -> None:
        """The others need not wait for this one, or any longer."""
        if self.pending:
            self.pending = False
            self._group.expected -= 1
            if not self._group.expected and not self._group.to_begin:
                self._group.begin_all()


class _Group:
    def __init__(self, replicas: Replicas, size: int) -> None:
        self._replicas = replicas
        self.members = 0
        # Those that are about to.
        self.to_begin = size
        # Those of them that have not asked for anything yet.
        self.expected = 0
        # What is about to be asked for, by what it says.
        self._gathering: dict[bytes, _Call] = {}

    def ask(self, request: GenerateRequest, timeout_s: float) -> asyncio.Future[Generated]:
        """A place in the call that asks for this."""
        seeds = [request.sampling.seed] if request.sampling.HasField("seed") else []
        request.sampling.ClearField("seed")
        # Seeded and unseeded ones apart.
        said = bytes(len(seeds)) + request.SerializeToString(deterministic=True)
        call = self._gathering.get(said)
        if call is None:
            call = self._gathering[said] = _Call(self._replicas, request)
            call.timer = asyncio.get_running_loop().call_later(GATHER_SECONDS, self._begin, said)
        answered = call.join(seeds, timeout_s)
        if len(call.places) == MAX_COMPLETIONS:
            self._begin(said)
        return answered

    def begin_all(self) -> None:
        """Nobody is left to wait for."""
        for said in list(self._gathering):
            self._begin(said)

    def _begin(self, said: bytes) -> None:
        self._gathering.pop(said).begin()


_Place = tuple[asyncio.Future[Generated], list[int]]


class _Call:
    """One call for several members; begun once."""

    timer: asyncio.TimerHandle

    def __init__(self, replicas: Replicas, request: GenerateRequest) -> None:
        self._replicas = replicas
        self._request = request
        self._deadline = 0.0
        self._task: asyncio.Task[None] | None = None
        # Who waits, and the seed of each where they have one.
        self.places: list[_Place] = []
        # The turns that it is part of.
        self._turns: list[tracing.Place] = []

    def join(self, seeds: list[int], timeout_s: float) -> asyncio.Future[Generated]:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Generated] = loop.create_future()
        answered.add_done_callback(self._left)
        self.places.append((answered, seeds))
        self._turns.append(tracing.here())
        self._deadline = max(self._deadline, loop.time() + timeout_s)
        return answered

    def begin(self) -> None:
        self.timer.cancel()
        self.places = [place for place in self.places if not place[0].done()]
        if self.places:
            self._task = asyncio.create_task(self._ask_for_all())

    def _left(self, _: asyncio.Future[Generated]) -> None:
        futures = [one for one, _ in self.places]
        if self._task is None or not all(one.done() for one in futures):
            return
        # Else all of it was waited for, and it ends by itself.
        if any(one.cancelled() for one in futures):
            self._task.cancel()

    async def _ask_for_all(self) -> None:
        with tracing.span("first turns", links=self._turns, members=len(self.places)):
            await self._ask(self.places)

    async def _ask(self, places: Sequence[_Place]) -> None:
        request, remaining_s = GenerateRequest(), self._deadline - asyncio.get_running_loop().time()
        request.CopyFrom(self._request)
        request.n = len(places)
        for _, seeds in places:
            request.completion_seeds.extend(seeds)
        try:
            async with aclosing(self._replicas.as_completed(request, remaining_s)) as answers:
                async for index, answer in answers:
                    waiting, _ = places[index]
                    if not waiting.done():
                        waiting.set_result(answer)
        except Exception as error:  # noqa: BLE001 - carried to whoever waits
            left = [place for place in places if not place[0].done()]
            if len(places) > 1 and _is_of_the_call(error):
                await asyncio.gather(*(self._ask([place]) for place in left))
                return
            for waiting, _ in left:
                waiting.set_exception(error)


def _is_of_the_call(error: Exception) -> bool:
    """Whether it may be of one of them, and not of what all of them ask."""
    if not isinstance(error, QuartetError):
        return False
    return error.reason == "INTERNAL" or error.metadata.get("field") == STUCK
