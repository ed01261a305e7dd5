"""Trouble that lasts: since when, and what a person was told of it.

1. A person reads one note once it has lasted for as long as its owner says, with what is known of it then;
   and one when it is over, where the first one was written.
2. Whoever asks what there is now is told, from the first moment on (`said`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Note(Protocol):
    """Tells a person one sentence."""

    def __call__(self, message: str, *, warning: bool = False) -> None: ...


class Trouble:
    """Of one thing."""

    def __init__(self, note: Note, clock: Callable[[], float]) -> None:
        """There is none yet."""
        self._note = note
        self._clock = clock
        self._noted = False
        # By the clock.
        self.since: float | None = None
        # For a person; empty where there is none.
        self.said = ""

    def lasts(self, message: str, *, note_after_s: float) -> float:
        """It begins, or goes on: for how many seconds by now. `message` is for a person."""
        now = self._clock()
        if self.since is None:
            self.since = now
        self.said = message
        if now - self.since >= note_after_s and not self._noted:
            self._noted = True
            self._note(message, warning=True)
        return now - self.since

    @property
    def lasted_s(self) -> float:
        """For how long it has been there; 0 where there is none."""
        return 0.0 if self.since is None else self._clock() - self.since

    def over(self, what: str, at: float | None = None) -> None:
        """It was over at that time, now if none is given; `what` is then, such as "the trainer is back"."""
        if self.since is not None and self._noted:
            ended = self._clock() if at is None else at
            self._note(f"{what} after {ended - self.since:.0f} s")
        self.since, self._noted, self.said = None, False, ""

    def restart(self) -> None:
        """What lasted counts no longer, and nobody is told; what there is begins now."""
        self.since, self._noted, self.said = None, False, ""
