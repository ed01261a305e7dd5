"""The sequence of a run: calls applied strictly in order, each at most once.

1. Only number applied + 1 is applied. A number beyond is refused with SEQUENCE_GAP.
2. A repeated number with equal contents gets the kept result of its first application; while that one still
   runs, the repetition waits for it. With other contents, or when the result is no longer kept, it is refused
   with SEQUENCE_CONFLICT.
3. A call that fails was not applied: its number is free again.
4. An application that began goes on when its caller leaves.

No gRPC, no torch: applications are coroutines, contents are digests.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from quartet.errors import QuartetError

T = TypeVar("T")

#: A caller repeats its last call, rarely the one before; results are small.
KEPT_RESULTS = 64


@dataclass(frozen=True, slots=True)
class _Applied:
    digest: bytes
    result: Any


@dataclass(frozen=True, slots=True)
class _Running:
    seq_id: int
    digest: bytes
    task: asyncio.Task[Any]


class Sequence:
    """The calls of one run."""

    def __init__(self, applied: int = 0) -> None:
        self._applied = applied
        self._kept: OrderedDict[int, _Applied] = OrderedDict()
        self._running: _Running | None = None
        # The last call that moved the run to another place in its sequence; repeatable until the next
        # application.
        self._moved: tuple[int, _Applied] | None = None

    @property
    def applied(self) -> int:
        """The last applied number."""
        return self._applied

    async def apply(
        self,
        seq_id: int,
        digest: bytes,
        work: Callable[[], Awaitable[T]],
        moves_to: Callable[[T], int] | None = None,
    ) -> T:
        """Apply `work` as number seq_id, or return what it gave before.

        moves_to: for work that returns the run to an earlier place, the number it then stands at.
        Errors: INVALID_REQUEST (0), SEQUENCE_GAP, SEQUENCE_CONFLICT, and those of the work.
        """
        if seq_id < 1:
            raise QuartetError(
                "INVALID_REQUEST", "seq_id counts from 1", field="seq_id", value=seq_id, remedy="begin at 1"
            )
        if self._moved is not None and self._moved[0] == seq_id and self._moved[1].digest == digest:
            return cast(T, self._moved[1].result)
        running = self._running
        if running is not None and running.seq_id == seq_id:
            self._same(seq_id, running.digest, digest)
        elif seq_id <= self._applied:
            return cast(T, self._repeat(seq_id, digest))
        elif seq_id > self._applied + 1:
            under_way = f"{running.seq_id} is under way: send one call after the other" if running else ""
            raise QuartetError(
                "SEQUENCE_GAP",
                f"seq_id {seq_id} leaves a gap: {self._applied} was applied last, "
                f"{under_way or 'send what is missing'}",
                have=self._applied,
                want=seq_id,
            )
        else:
            task = asyncio.create_task(self._application(seq_id, digest, work, moves_to))
            running = self._running = _Running(seq_id, digest, task)
        result: T = await asyncio.shield(running.task)
        return result

    async def settle(self) -> None:
        """Wait until nothing is being applied."""
        if self._running is not None:
            await asyncio.wait({self._running.task})

    async def _application(
        self,
        seq_id: int,
        digest: bytes,
        work: Callable[[], Awaitable[T]],
        moves_to: Callable[[T], int] | None,
    ) -> T:
        try:
            result = await work()
        finally:
            self._running = None
        if moves_to is None:
            self._applied, self._moved = seq_id, None
            self._kept[seq_id] = _Applied(digest, result)
            while len(self._kept) > KEPT_RESULTS:
                self._kept.popitem(last=False)
        else:
            self._applied, self._moved = moves_to(result), (seq_id, _Applied(digest, result))
            # Numbers of the abandoned way will be given again, with other contents.
            self._kept.clear()
        return result

    def _repeat(self, seq_id: int, digest: bytes) -> Any:
        kept = self._kept.get(seq_id)
        if kept is None:
            raise QuartetError(
                "SEQUENCE_CONFLICT",
                f"seq_id {seq_id} was applied, its result is no longer kept; go on after {self._applied}",
                have=self._applied,
                want=seq_id,
            )
        self._same(seq_id, kept.digest, digest)
        return kept.result

    def _same(self, seq_id: int, held: bytes, wanted: bytes) -> None:
        if held != wanted:
            raise QuartetError(
                "SEQUENCE_CONFLICT",
                f"seq_id {seq_id} was given with other contents; a number names one call for ever, and one "
                "program drives a run: GetRun says which call was applied last",
                held_digest=held.hex(),
                wanted_digest=wanted.hex(),
            )
