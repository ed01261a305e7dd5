"""What the event loops ask of the decoding thread.

1. Commands run in the thread, between two decode steps, in the order in which they were given.
2. At most `max_waiting` completions are admitted and not yet in the batch; more are refused with OVERLOADED.
3. Once it is closed nothing is taken any more that awaits an answer: NOT_READY.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from quartet_inference.engine import not_ready
from quartet_inference.room import check_room

T = TypeVar("T")
Command = Callable[[], None]


class Commands:
    """A queue into the decoding thread. Safe from any thread."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._queue: deque[Command] = deque()
        self._taken: deque[Command] = deque()  # by the thread, and not run yet
        self._wake = threading.Condition()
        self._admitted = 0  # completions accepted and not yet in the batch
        self.closing = False

    def post(self, command: Command) -> None:
        """Run it, unless the thread has ended; nobody waits for that."""
        with self._wake:
            self._append(command)

    def submit(self, command: Command) -> None:
        """Run it. Errors: NOT_READY."""
        with self._wake:  # not after the thread's last look
            if self.closing:
                raise not_ready()
            self._append(command)

    def admit(self, completions: int, command: Command) -> None:
        """Run it, and count so many completions as waiting. Errors: NOT_READY, and those of `check_room`."""
        with self._wake:
            if self.closing:
                raise not_ready()
            check_room(self._admitted, completions, self._max_waiting)
            self._admitted += completions
            self._append(command)

    def admitted(self, change: int) -> None:
        """So many more wait, or fewer: they have joined the batch, left it again, or ended."""
        with self._wake:
            self._admitted += change

    async def call(self, command: Callable[[], T]) -> T:
        """Run it and return its result, or raise its exception. Errors: NOT_READY."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def tell(result: T | None, error: BaseException | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result, error)

        def run() -> None:
            try:
                result = command()
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                tell(None, error)
            else:
                tell(result, None)

        self.submit(run)
        return await answer

    def run(self, *, idle: bool) -> bool:
        """Run what was given; an idle thread waits for that, or for the end. Whether there was anything."""
        with self._wake:
            while idle and not self._queue and not self.closing:
                self._wake.wait()
            self._taken.extend(self._queue)
            self._queue.clear()
        ran = bool(self._taken)
        while self._taken:
            self._taken.popleft()()
        return ran

    def end(self) -> None:
        """Let the thread end after what it was asked for before."""
        with self._wake:
            self.closing = True
            self._wake.notify()

    def close(self) -> list[Command]:
        """Of the thread that has ended: take nothing more; what nobody has run."""
        with self._wake:
            self.closing = True
            left = [*self._taken, *self._queue]
            self._taken.clear()
            self._queue.clear()
            return left

    def _append(self, command: Command) -> None:
        self._queue.append(command)
        self._wake.notify()
