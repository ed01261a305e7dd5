"""Runs that are in the folder and not at hand: those that cannot be used, and those that are not open yet.

1. One whose book cannot be opened now is tried again every AGAIN_S; one that was not read at the start
   (shelf.py) is read at once, one after the other. Each goes on as soon as it is open. One that was not read
   stays unread for as long as somebody else has its lock.
2. Every other one stays as it is, with the reason, until it is deleted. Where a fault of the orchestrator
   keeps one from being opened, it keeps no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from pathlib import Path

import structlog
from quartet.errors import QuartetError

from quartet_orchestrator import journal, shelf
from quartet_orchestrator.book import Book

log = structlog.get_logger()


class SetAside:
    """By their names. For one event loop."""

    def __init__(
        self, folder: Path, take_up: Callable[[str, Book], bool], alone: Callable[[str], asyncio.Lock]
    ) -> None:
        """`take_up` goes on with a run, or puts it here and is False; `alone` is held while one is opened."""
        self._folder = folder
        self._take_up = take_up
        self._alone = alone
        self._why: dict[str, QuartetError] = {}
        # In the order in which they are read.
        self._unread: dict[str, None] = {}
        # What opens the others, until there are none or all is closed.
        self._opening: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._why

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._why))

    def __getitem__(self, run_id: str) -> QuartetError:
        """Why it is here, to be raised: one that is raised twice collects tracebacks."""
        return copy(self._why[run_id])

    def put(self, run_id: str, why: QuartetError) -> None:
        """It cannot be used, and stays here."""
        self._why[run_id] = why

    def forget(self, run_id: str) -> None:
        """It was deleted."""
        self._why.pop(run_id, None)

    def waits(self, run_id: str) -> bool:
        """Whether it goes on by itself once it is open."""
        why = self._why.get(run_id)  # once: metrics are read in a thread
        return why is not None and shelf.passes(why)

    def is_unread(self, run_id: str) -> bool:
        """Whether nobody has looked at it yet: it may be at work as soon as somebody does."""
        return run_id in self._unread

    def start(self, found: shelf.Shelf) -> None:
        """Takes what was not opened, and begins to open it."""
        self._why.update(found.set_aside)
        self._unread = dict.fromkeys(found.unread)
        if any(map(self.waits, self)):
            self._opening = asyncio.create_task(self._open())

    async def close(self) -> None:
        """Opens no other run."""
        self._closing.set()
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)

    async def _open(self) -> None:
        for run_id in list(self._unread):
            await self._open_alone(run_id)
        while waiting := [run_id for run_id in self if self.waits(run_id)]:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), journal.AGAIN_S)
                return
            for run_id in waiting:
                await self._open_alone(run_id)

    async def _open_alone(self, run_id: str) -> None:
        async with self._alone(run_id):
            if run_id not in self._why or self._closing.is_set():  # it may have been deleted
                return
            try:
                book = await asyncio.to_thread(shelf.open_one, self._folder / run_id)
            except BlockingIOError:
                return  # somebody looks at it, who is no orchestrator
            except QuartetError as error:
                return self._looked_at(run_id, error)
            except Exception as error:  # it keeps no other from going on
                log.error("run not opened", run_id=run_id, exc_info=error)
                return self._looked_at(run_id, shelf.faulty(run_id, error))
            self._unread.pop(run_id, None)
            if book is not None:
                if self._closing.is_set():
                    book.close()
                    return
                if not self._take_up(run_id, book):
                    return
                log.info("run opened", run_id=run_id)
            del self._why[run_id]

    def _looked_at(self, run_id: str, why: QuartetError) -> None:
        self._why[run_id] = why
        self._unread.pop(run_id, None)
