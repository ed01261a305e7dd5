"""Runs a run beside the caller's thread, so that a script may have other threads, signal handlers and a
running event loop (a notebook) of its own.

1. `run` returns what the work returned, or raises what it raised.
2. Ctrl-C in the waiting thread asks the run to stop after the step under way; a second one, however soon,
   kills the services, and breaks off what the thread does while it waits (6). Either way `run` then raises
   KeyboardInterrupt, once the services have ended. A handler of the script's own for that signal is asked
   first: what it does not raise on asks for nothing. What the waiting thread still does once they have ended
   is interrupted as any code is.
3. Somebody beside the run may end it with an error, once: the services end at once, and `run` raises it,
   unless the run has come to its end.
4. Somebody beside it may ask the run to stop after the step under way, as the first Ctrl-C does (`stop`);
   `run` then returns what the work returns. Ctrl-C behind that is the first all the same.
5. The thread is a daemon: where the process ends without waiting, the kernel ends the services with it.
6. The thread that waits may do something else until the event that it is given is set. A KeyboardInterrupt
   that nobody pressed is an error of that (3).
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Generic, TypeVar

from quartet.cli.asked import Interrupts
from quartet.scripts.waiting import wait_in_slices

T = TypeVar("T")


class Background(Generic[T]):
    """Work in a thread of its own, which `listen` lets be interrupted while a run is driven."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None
        # Taken again by a handler that interrupts another one.
        self._lock = threading.RLock()
        self._asked = False
        # Of whoever asks the run to stop first. Taken in one piece: a handler may come in between.
        self._first = [object()]
        self._presses = 0
        self._is_telling = self._may_break_off = False
        #: What somebody beside the run ended it with (3).
        self.ended_with: BaseException | None = None
        # Of what is under way: how it is told of Ctrl-C, and how it is ended at once.
        self._driven: tuple[Callable[[], object], Callable[[], object]] | None = None

    def run(self, work: Callable[[], T], wait: Callable[[threading.Event], object] = wait_in_slices) -> T:
        """Do it there and `wait` here."""
        with self._interrupted_by_signal():
            threading.Thread(target=self._body, args=(work,), name="quartet", daemon=True).start()
            while not self._ended.is_set():
                try:
                    self._may_break_off = True
                    wait(self._ended)
                except KeyboardInterrupt as error:
                    if self._asked:
                        continue  # a second Ctrl-C; the services end before anybody is told
                    if self._ended.is_set():
                        raise
                    self.end(error)
                finally:
                    self._may_break_off = False
        if self._asked:
            raise KeyboardInterrupt from None
        if self.ended_with is not None and not self._result:
            raise self.ended_with
        if self._error is not None:
            raise self._error
        return self._result[0]

    def end(self, error: BaseException) -> None:
        """Ends the run with it, where it has not ended by itself; of several with the first. From any
        thread."""
        with self._lock:
            if self.ended_with is None and not self._ended.is_set():
                self.ended_with = error
                if self._driven is not None:
                    self._driven[1]()

    def stop(self) -> None:
        """Asks the run to stop in order, once, where nobody has."""
        with self._lock:
            if self._is_first() and self._driven is not None:
                self._driven[0]()

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
                if self._ended.is_set():
                    raise
                self._presses += 1
                is_within, self._is_telling = self._is_telling, True
                try:
                    self._interrupt()
                finally:
                    self._is_telling = is_within
                # What the thread does meanwhile may never end by itself, as a reward function that hangs.
                # Where this interrupts the telling of another one, that is told first.
                if self._presses > 1 and self._may_break_off and not is_within:
                    self._may_break_off = False
                    raise

        signal.signal(signal.SIGINT, asked)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def listen(self, interrupts: Interrupts) -> Iterator[None]:
        """Of quartet.cli.drive: while inside, Ctrl-C of the waiting thread reaches the run."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "a run is driven by a task"
        with self._under_way(
            lambda: loop.call_soon_threadsafe(_asked_for, interrupts, task),
            lambda: loop.call_soon_threadsafe(task.cancel),
        ):
            yield

    def command(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Runs a command, of the work in that thread; Ctrl-C, or an error beside it, kills it."""
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                with self._under_way(process.kill, process.kill):
                    said, told = process.communicate()
            except BaseException:
                process.kill()  # it would be waited for
                raise
        if self.ended_with is not None:
            raise self.ended_with
        return subprocess.CompletedProcess(words, process.returncode, said, told)

    @contextmanager
    def _under_way(self, interrupt: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
        with self._lock:
            if self._asked:
                raise KeyboardInterrupt
            if self.ended_with is not None:
                raise self.ended_with
            self._driven = interrupt, end
            if not self._first:
                interrupt()
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
            # A run that was asked to stop by somebody else would take the first Ctrl-C for a second one.
            is_second, self._asked = self._asked, True
            if (self._is_first() or is_second) and self._driven is not None:
                self._driven[0]()

    def _is_first(self) -> bool:
        """Whether nobody has asked the run to stop before."""
        try:
            self._first.pop()
        except IndexError:
            return False
        return True


def _asked_for(interrupts: Interrupts, task: asyncio.Task[object]) -> None:
    if interrupts.asked_again():
        task.cancel()
