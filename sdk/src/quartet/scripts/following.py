"""How callbacks follow a training: by what its metrics.jsonl says, in the thread that called train().

1. They are called while that thread waits, by `look`, for the lines that have become whole since; and behind
   the end once more, so that no line is missed however it ends, unless by one of them.
2. Lines from before the training have no events. Where the file is written anew (a training that goes on from
   an earlier state leaves out the lines behind it), these are those that are as they were.
3. What one raises ends the training, and is raised behind its end; no callback is called after that.
4. Only what is new is read, nothing where nothing is, and nothing at all where there are no callbacks when it
   is opened.
5. A training that never began has no events, whatever its folder holds behind that: what a run that did not
   begin was to overwrite is there again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from quartet.cli.points import Lines
from quartet.scripts.argument_list import ArgumentList
from quartet.scripts.callbacks import Callbacks
from quartet.scripts.loop import Event, Length, Loop, Moment
from quartet.scripts.outcome import METRICS, Row
from quartet.scripts.waiting import nothing


class Following:
    """One training."""

    def __init__(self, callbacks: Callbacks, args: ArgumentList, folder: Path) -> None:
        """It is opened, and has no events before."""
        self._callbacks, self._args = callbacks, args
        self._lines = Lines(folder / METRICS)
        self._opened: tuple[Callable[[Row], Moment], Length, list[Moment], list[Row]] | None = None
        #: Whether the training has begun.
        self.has_begun = False
        self._loop: Loop | None = None
        # What has not been told: of the first of them, or of the beginning, the events that are left.
        self._moments: deque[Moment] = deque()
        self._events: Iterator[Event] | None = None
        self._error: BaseException | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has been opened."""
        return self._opened is not None

    def open(
        self, length: Length, moment_of: Callable[[Row], Moment], before: Sequence[Row] | None = None
    ) -> None:
        """The training has the folder, and goes on behind the lines that are there: all, or those that are as
        they were before. From any thread."""
        if not self._callbacks.callbacks:
            return
        rows = list(self._lines.new())
        known = len(rows)
        if before is not None:
            known = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(rows, before, strict=False))))
        # Here, and not in the thread that waits: of a long training these are many.
        moments = list(map(moment_of, rows[:known]))
        self._opened = moment_of, length, moments, rows[known:]

    def begin(self) -> None:
        """It has begun: from here on they are called. From any thread."""
        self.has_begun = True

    def look(self, stop: Callable[[], object], end: Callable[[BaseException], object]) -> None:
        """Call them for what is new. `stop` is called where one wants the training to stop, as often as it
        does; `end` with what one raises."""
        if self._error is not None:
            return
        try:
            self._tell(stop)
        except KeyboardInterrupt:  # of a person, who asks whoever waits
            raise
        except BaseException as error:  # noqa: BLE001 - raised behind the end
            self._error = error
            end(error)

    @contextmanager
    def to_its_end(self) -> Iterator[None]:
        """It is trained inside. What has not been told by then is told behind it."""
        try:
            yield
        except BaseException:
            if self._error is None:
                self._tell(nothing)
            raise
        if self._error is not None:
            raise self._error
        self._tell(nothing)  # it has ended: nobody can stop it
        if self._loop is not None:
            for event, told in self._loop.ended():
                self._callbacks.call(event, **told)

    def _tell(self, stop: Callable[[], object]) -> None:
        if self._opened is None or not self.has_begun:
            return
        moment_of, length, known, more = self._opened
        if self._loop is None:
            self._loop = Loop(self._callbacks, self._args, length, known)
            self._moments.extend(map(moment_of, more))
            self._rest(self._loop.begun(), stop)
        else:
            self._rest(self._events, stop)
        # Read before any of it is told: where that is broken off, the next look goes on with it.
        self._moments.extend(map(moment_of, self._lines.new()))
        while self._moments:
            self._rest(self._loop.after(self._moments.popleft()), stop)

    def _rest(self, events: Iterator[Event] | None, stop: Callable[[], object]) -> None:
        """Calls them for each. Kept where it is broken off."""
        self._events = events
        for event, told in events or ():
            self._callbacks.call(event, **told)
            if self._loop is not None and self._loop.is_to_stop:
                stop()
        self._events = None
