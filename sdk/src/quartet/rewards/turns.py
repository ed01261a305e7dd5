"""Calls of what may hold something that no two threads may use: one at a time, and always in the same thread.

1. They are made one at a time, in the order in which they were asked for.
2. They are made in a thread of their own, which lasts as long as the process; but where a thread lends itself
   (`lend`), in that one. TRL calls reward functions in the thread that called train(), and what bounds its
   time by signals (math_verify does, by SIGALRM) works in a process's main thread alone. That thread may
   look after something else between two calls, LOOK_SECONDS after the last time at the latest.
3. One that nobody waits for any more is not made.
4. A process that a call forked and that comes back out of it ends there: it is not the script.
5. A call that does not return is known by what it said last that it is `doing`, and since when.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from quartet.rewards import forked
from quartet.scripts.waiting import LOOK_SECONDS, nothing

T = TypeVar("T")


class Turns:
    """Whose turn it is. As many wait as RPCs are under way."""

    def __init__(self) -> None:
        """No thread is started before the first call."""
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._under_way = False
        self._is_lent = False
        self._lender: int | None = None
        # Of the call under way: its thread and its process.
        self._caller: tuple[int, int] | None = None
        # What it calls, and since when, on the monotonic clock.
        self._doing: tuple[str, float] | None = None
        self._own: threading.Thread | None = None

    async def call(self, work: Callable[[], T]) -> T:
        """What it returns, or raises, when it has had its turn."""
        future: Future[T] = Future()
        with self._changed:
            if self._own is None:
                self._own = threading.Thread(target=self._work, name="reward functions", daemon=True)
                self._own.start()
            self._waiting.append((future, work))
            self._changed.notify_all()
        return await asyncio.wrap_future(future)

    @property
    def is_inside(self) -> bool:
        """Whether whoever asks is inside of a call."""
        return self._caller is not None and self._caller[0] == threading.get_ident()

    def doing(self, what: str) -> None:
        """Said inside of a call, before each thing of a script that it calls."""
        self._doing = what, time.monotonic()

    @property
    def held_by(self) -> tuple[str, float]:
        """What is called now, and for how many seconds it has not returned (5), from any thread; empty where
        nothing is."""
        what, since = self._doing or ("", time.monotonic())
        return what, time.monotonic() - since

    def leave_child(self, error: BaseException | None = None) -> None:
        """Called where what a script gave has returned, or raised: a process that it forked ends (4)."""
        if self._caller is not None:
            forked.leave(self._caller[1], error)

    def lend(self, ended: threading.Event, look: Callable[[], object] = nothing) -> None:
        """Make the calls in this thread until that is set, and `look` between them. A second thread that
        lends itself waits, and takes over where the first is done. One that is lent, and lends itself again
        in a `look`, goes on making them."""
        if self._lender == threading.get_ident():
            self._serve(ended, look)
            return
        while not self._lend():
            look()
            if ended.wait(LOOK_SECONDS):
                return
        try:
            self._serve(ended, look)
        finally:
            with self._changed:
                self._is_lent, self._lender = False, None
                self._changed.notify_all()

    def _serve(self, ended: threading.Event, look: Callable[[], object]) -> None:
        while not ended.is_set():
            look()
            self._next(LOOK_SECONDS, lent=True)

    def _lend(self) -> bool:
        """Whether no other thread is lent, so that this one is."""
        with self._changed:
            is_first, self._is_lent = not self._is_lent, True
            if is_first:
                self._lender = threading.get_ident()
        return is_first

    def _work(self) -> None:
        while True:
            self._next(None, lent=False)

    def _next(self, seconds: float | None, *, lent: bool) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._may_begin(lent=lent), seconds):
                return
            future, work = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                return
            self._under_way = True
            self._caller = threading.get_ident(), os.getpid()
        try:
            result = work()
            self.leave_child()
            future.set_result(result)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)
        finally:
            with self._changed:
                self._under_way, self._caller, self._doing = False, None, None
                self._changed.notify_all()

    def _may_begin(self, *, lent: bool) -> bool:
        return bool(self._waiting) and not self._under_way and self._is_lent is lent
