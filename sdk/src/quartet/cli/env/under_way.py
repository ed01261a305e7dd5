"""What a command does with an environment, while it does it: on stderr, for what it says is on stdout.

1. On a terminal it is one line, written again and again, and gone at the end.
2. Elsewhere it is nothing where all goes fast, and else a line after FIRST_SECONDS, and each further one
   after twice as long: an hour has eight. Also where nothing ends, so that whoever waits sees for what.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from quartet.kit.standard_streams import only_shown, say, shown

#: Most environments are checked sooner.
FIRST_SECONDS: Final = 10.0
REFRESH_PER_SECOND: Final = 4


class UnderWay:
    """What is done now, and how much of it."""

    def __init__(self, what: str) -> None:
        self._began = time.monotonic()
        self._what, self._wanted, self._ended, self._failed = what, 0, 0, 0

    def doing(self, what: str, rollouts: int = 0) -> None:
        """That begins, of which so many rollouts are to end."""
        self._what, self._wanted, self._ended, self._failed = what, rollouts, 0, 0

    def ended(self, *, failed: bool) -> None:
        """A rollout ended."""
        self._ended += 1
        self._failed += failed

    @property
    def line(self) -> str:
        """It in a line, with the seconds since the beginning."""
        line = f"{time.monotonic() - self._began:6.1f} s  {self._what}"
        if self._wanted:
            line += f": {self._ended} of {self._wanted} rollouts"
        return line + (f", {self._failed} failed" if self._failed else "")


@contextmanager
def telling(under_way: UnderWay) -> Iterator[None]:
    """While inside, whoever waits is told."""
    if sys.stderr.isatty():
        with _live(under_way):
            yield
        return
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(under_way, over), daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


@contextmanager
def _live(under_way: UnderWay) -> Iterator[None]:
    def line() -> Text:
        return Text(shown(under_way.line), no_wrap=True, overflow="ellipsis")

    live = Live(
        console=Console(stderr=True),
        refresh_per_second=REFRESH_PER_SECOND,
        get_renderable=line,
        transient=True,
        redirect_stdout=False,  # which is not this console's
    )
    live.start()
    try:
        yield
    finally:
        with only_shown(sys.stderr):
            live.stop()


def _tell(under_way: UnderWay, over: threading.Event) -> None:
    seconds = FIRST_SECONDS
    while not over.wait(seconds):
        say(under_way.line, sys.stderr)
        seconds *= 2
