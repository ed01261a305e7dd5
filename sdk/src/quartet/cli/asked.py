"""The signals by which a person, or who manages processes, asks a command for the end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

from quartet.cli import exits
from quartet.kit.standard_streams import say

#: `timeout`, and many a program that starts another, tell a process what its whole group is told, too: a wish
#: that is heard twice is one. Nobody presses Ctrl-C twice in so little time and means two.
ONE_WISH_SECONDS = 0.25


class Closed(Protocol):
    """What gives the terminal back."""

    def close(self) -> None:
        """Do that."""


class Interrupts:
    """Counts how often somebody asked for the end: the first sets `asked`, the second kills everything."""

    def __init__(self, kill: Callable[[], None], display: Closed, how_to_resume: str = "") -> None:
        self.asked = asyncio.Event()
        self._how_to_resume = how_to_resume
        self._heard = -ONE_WISH_SECONDS  # of monotonic()
        self._kill = kill
        self._display = display

    def asked_again(self) -> bool:
        """Somebody asks. Whether it was the second time, and everything is killed."""
        if not self.asked.is_set():
            self.asked.set()
            return False
        self._kill()
        return True

    def signalled(self) -> None:
        """Ctrl-C of a command, which the second ends with everything else."""
        now = monotonic()
        if now - self._heard < ONE_WISH_SECONDS:
            return
        self._heard = now
        if self.asked_again():
            self._display.close()  # gives the terminal back
            how = self._how_to_resume or " --resume"
            say(f"killed; what was done is kept; go on with{how}", sys.stderr)
            os._exit(exits.INTERRUPTED)


@contextmanager
def listening(asked: Callable[[], None], closed: Callable[[], None]) -> Iterator[None]:
    """`asked` is called for each Ctrl-C and SIGTERM, `closed` for each SIGHUP, by which the terminal is gone;
    not where that is ignored (`nohup`). On the main thread only."""
    loop = asyncio.get_running_loop()
    heard = dict.fromkeys((signal.SIGINT, signal.SIGTERM), asked)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        # However often: the shell of the terminal sends one, and the system another.
        heard[signal.SIGHUP] = closed
    for number, told in heard.items():
        loop.add_signal_handler(number, told)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)
