"""Runs a run beside the caller's thread, so that a script may have other threads, signal handlers and a
running event loop (a notebook) of its own.

1. `run` returns what the work returned, or raises what it raised.
2. Ctrl-C in the waiting thread asks the run to stop after the step under way; a second one, however soon,
   kills the services. Either way `run` then raises KeyboardInterrupt, once the services have ended.
   A handler of the script's own for that signal is asked first: what it does not raise on asks for nothing.
3. The thread is a daemon: where the process ends without waiting, the kernel ends the services with it.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Generic, TypeVar

from quartet.cli.asked import Interrupts

T = TypeVar("T")

#: A signal is heard after so long at the latest.
LOOK_SECONDS = 0.2


class Background(Generic[T]):
    """Work in a thread of its own, which `listen` lets be interrupted while a run is driven."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None
        # Taken again by a handler that interrupts another one.
        self._lock = threading.RLock()
        self._asked = False
        # The run that is being driven, with the loop and the task that drive it.
        self._driven: tuple[Interrupts, asyncio.AbstractEventLoop, asyncio.Task[object]] | None = None

    def run(self, work: Callable[[], T]) -> T:
        """Do it there and wait here."""
        with self._interrupted_by_signal():
            threading.Thread(target=self._body, args=(work,), name="quartet", daemon=True).start()
            # In slices: a signal that comes between Python's last look and the wait interrupts no wait.
            while not self._ended.wait(LOOK_SECONDS):
                pass
        if self._asked:
            raise KeyboardInterrupt from None
        if self._error is not None:
            raise self._error
        return self._result[0]

    @contextmanager
    def _interrupted_by_signal(self) -> Iterator[None]:
        """Ctrl-C asks, and raises nowhere on the way: a second one may come while the first is told."""
        before = signal.getsignal(signal.SIGINT)
        if threading.get_ident() != threading.main_thread().ident or not callable(before):
            yield  # no signal is handled here, or this one is ignored
            return

        def asked(number: int, frame: FrameType | None) -> None:
            try:
                before(number, frame)
            except KeyboardInterrupt:
                self._interrupt()

        signal.signal(signal.SIGINT, asked)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def listen(self, interrupts: Interrupts) -> Iterator[None]:
        """Of quartet.cli.drive: while inside, Ctrl-C of the waiting thread reaches the run."""
        task = asyncio.current_task()
        assert task is not None, "a run is driven by a task"
        with self._lock:
            if self._asked:
                raise KeyboardInterrupt
            self._driven = interrupts, asyncio.get_running_loop(), task
        try:
            yield
        finally:
            with self._lock:
                self._driven = None

    def _body(self, work: Callable[[], T]) -> None:
        try:
            self._result.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self._error = error
        finally:
            self._ended.set()

    def _interrupt(self) -> None:
        with self._lock:
            self._asked = True
            if self._driven is not None:
                interrupts, loop, task = self._driven
                loop.call_soon_threadsafe(_asked_for, interrupts, task)


def _asked_for(interrupts: Interrupts, task: asyncio.Task[object]) -> None:
    if interrupts.asked_again():
        task.cancel()
