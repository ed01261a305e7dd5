"""The signals by which a person, or who manages processes, asks a command for the end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
