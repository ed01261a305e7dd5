"""What a person sees of a fine-tuning: a live line on a terminal, lines now and then elsewhere.

1. Every step is in metrics.jsonl. Shown elsewhere than on a terminal are the first step and the last of what
   this process does, those that were skipped, and between them one once LINE_SECONDS and a LINES-th of all
   steps have passed since the line before: a short fine-tuning is told in a few lines, the longest in not
   many more than LINES.
2. What is news (a measurement, a skipped step, where it goes on) is a line on its own everywhere.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.text import Text

from quartet.cli.display import Plain
from quartet.cli.live_area import LiveArea
from quartet.kit.standard_streams import shown

#: From one line to the next: as often as steps of a reinforcement learning end, roughly.
LINE_SECONDS = 10.0
#: Of a fine-tuning: what a person still scrolls through.
LINES = 100


class Display(Protocol):
    """Shows a fine-tuning."""

    def say(self, line: str) -> None:
        """News."""

    def waiting(self, what: str) -> None:
        """Nothing is to be seen until that is over."""

    def step(self, number: int, line: str, *, is_news: bool) -> None:
        """A step was taken; they count from 1."""

    def close(self) -> None:
        """It ended."""


@dataclass
class Remaining:
    """How long the steps that are left will take, by those that this process took."""

    steps: int
    _began: float = field(default_factory=time.monotonic)
    _first: int | None = None

    def begun(self) -> None:
        """The first step begins now, again where it was taken before; so far the model was loading."""
        self._began, self._first = time.monotonic(), None

    def after(self, step: int) -> str:
        """In words, once this step is taken; nothing after the last."""
        if self._first is None:
            self._first = step
        seconds = (time.monotonic() - self._began) / (step - self._first + 1)
        left = seconds * (self.steps - step)
        return duration(left) if step < self.steps else ""


def duration(seconds: float) -> str:
    """ "40 s", "12 min", "3 h 20 min": as exactly as it can be foretold."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


class Lines(Plain):
    """Lines with the seconds since the beginning."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps
        self._told: tuple[int, float] | None = None

    def waiting(self, what: str) -> None:
        """A line."""
        self.say(what)

    def step(self, number: int, line: str, *, is_news: bool) -> None:
        """A line, where one is due."""
        now = time.monotonic()
        if is_news or self._is_due(number, now):
            self._told = (number, now)
            self.say(line)

    def _is_due(self, number: int, now: float) -> bool:
        if self._told is None or number == self._steps:
            return True
        last, then = self._told
        return now - then >= LINE_SECONDS and number - last >= self._steps / LINES


class LiveLine(LiveArea):
    """One line."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._steps = steps
        self._now, self._began = "", time.monotonic()
        super().__init__(self._line, console)

    def waiting(self, what: str) -> None:
        """In the live line."""
        self._now = what

    def step(self, number: int, line: str, *, is_news: bool) -> None:
        """In the live line; the last one stays."""
        self._now = line
        if is_news or number == self._steps:
            self.say(line)

    def _line(self) -> Text:
        # The seconds go on where a step takes long.
        passed = time.monotonic() - self._began
        return Text(f"{passed:6.1f} s  {shown(self._now)}", no_wrap=True, overflow="ellipsis")


def display(steps: int, *, plain: bool) -> Display:
    """The one for this terminal."""
    return Lines(steps) if plain or not sys.stdout.isatty() else LiveLine(steps)
