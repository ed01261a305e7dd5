"""Outages: a service that is away is waited for, and somebody is told.

1. Errors that mean "not now" (AWAY, LOCKED_OUT) are tried again with jittered backoff for as long as the
   service is away, but at most for `patience_s`: then `RunInterrupted`. An outage begins with a failure and
   ends with the next sign of life (4). Time in which this process did not run itself is none of it
   (quartet.kit.awake).
2. A fault of the service (INTERNAL) may be a passing one and is tried again, too, MAX_FAULTS times in a row:
   then it is `RunInterrupted`. So is a service of another release (NOT_IMPLEMENTED), at once: nothing is
   lost, and whoever mends or upgrades it goes on. Only where a method is not there, it is away for STRANGER_S
   before: another service may have got its address, until the name is asked for again. Everything else is the
   caller's.
3. A person reads one note when a service has been away for NOTE_AFTER_S, and one when it is back. One that
   was not there yet since this orchestrator was started may have been started with it, and is given STARTS_S.
4. A sign of life to anybody ends the outage for everybody: an answer, an error that is none of AWAY, a frame
   of a stream that goes on. A call that was answered, or stood for longer than STANDS_S before its connection
   broke, was with a service that was there since the call began.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TypeVar

from quartet.errors import QuartetError, has_no_method
from quartet.kit.awake import awake_s
from quartet.kit.backoff import pause_s

from quartet_orchestrator.trouble import Note, Trouble

T = TypeVar("T")

UNLOADED = "ENVIRONMENT_UNAVAILABLE"
AWAY = frozenset({"NOT_READY", "OVERLOADED", "DEADLINE", UNLOADED})
# A token that is replaced changes here and there, and each side reads its file again at its own time.
LOCKED_OUT = "UNAUTHENTICATED"
OTHER_RELEASE = "NOT_IMPLEMENTED"
FAULT = "INTERNAL"
# In a row: names are remembered on the way for 30 s and more, and whoever has the old address answers until
# then.
STRANGER_S = 60.0
MAX_FAULTS = 4
# What passes (memory that another run needed, a full disk) does not pass at once.
FAULT_PAUSE_S = 2.0
# A restart on the same machine takes about this long: not worth a note.
NOTE_AFTER_S = 2.0
# To load a model beside others that start takes about so long: what is not there until then was not away.
STARTS_S = 60.0
# One that cannot be made fails earlier, and so does one to a service that is frozen (quartet.kit.options).
STANDS_S = 60.0
FIRST_BACKOFF_S = 0.1
# A service that comes back is used again within this time.
MAX_BACKOFF_S = 5.0


class RunInterrupted(Exception):
    """The run cannot go on now, but nothing is lost: it stops and can be resumed. str() is one sentence."""


class RunFailed(Exception):
    """The run itself has come to an end that nobody outside of it can mend. str() is one sentence."""


def backoff_s(attempt: int) -> float:
    """Seconds to wait after a failed attempt, the first being 0; MAX_BACKOFF_S at most."""
    return pause_s(attempt, FIRST_BACKOFF_S, MAX_BACKOFF_S)


class Absence(Enum):
    """Why a service does not do what it is asked for: as it is told, once it has lasted, and what to do."""

    AWAY = "is away", "has been away", "start it again, then resume the run"
    UNLOADED = "lacks what it is asked for", "has lacked what it is asked for", "then resume the run"
    # It says itself what is to be done about it.
    HINDERED = "answers and cannot go on", "could not go on", "then resume the run"


def _absence_of(error: QuartetError) -> Absence:
    if error.reason == UNLOADED:
        return Absence.UNLOADED
    return Absence.HINDERED if error.metadata.get("remedy") else Absence.AWAY


class Outage:
    """One service's availability, as all of a run's calls to it see it."""

    def __init__(
        self,
        service: str,
        patience_s: float,
        note: Note,
        clock: Callable[[], float] = awake_s,
        *,
        started_at: float = -math.inf,
    ) -> None:
        """`started_at`: when this orchestrator was, by the clock."""
        self.service = service
        # Until then nobody knows whether it is away or was never there.
        self._starts_until = started_at + STARTS_S
        self._patience_s = patience_s
        self._clock = clock
        self._absence = Trouble(note, clock)

    def answered(self) -> None:
        """Somebody got a sign of life: an outage is over."""
        self._over(self._clock())

    def answered_since(self, began: float) -> None:
        """Somebody who asked then got something of the service: an outage that began earlier is over."""
        self._starts_until = -math.inf
        if self._absence.since is not None and began >= self._absence.since:
            self._over(began)

    def _over(self, at: float) -> None:
        self._starts_until = -math.inf
        self._absence.over(f"{self.service} is back", at)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Around one call that may take long, and nothing else that does."""
        began = self._clock()
        try:
            yield
        except QuartetError as error:
            # One that the service sent says what it was doing all that time; gRPC's own, that it was there.
            broke = error.reason == "NOT_READY" and "grpc_code" in error.metadata
            if broke and self._clock() - began > STANDS_S:
                self.answered_since(began)
            raise
        self.answered_since(began)

    def failed(self, message: str, absence: Absence = Absence.AWAY) -> None:
        """Somebody got no answer, or one that it is not away, and what it is. Raises RunInterrupted when that
        has lasted too long."""
        now, lasted, then = absence.value
        waiting = f"{self.service} {now}, waiting for it: {message}"
        note_after_s = math.inf if self._clock() < self._starts_until else NOTE_AFTER_S
        away_s = self._absence.lasts(waiting, note_after_s=note_after_s)
        if away_s > self._patience_s:
            raise RunInterrupted(
                f"{self.service} {lasted} for {away_s:.0f} s (patience_seconds = {self._patience_s:g}): "
                f"{message}; {then}"
            )

    @property
    def trouble(self) -> str:
        """What there is now, and what to do, for a person; empty where the service is there."""
        if not self._absence.said:
            return ""
        return (
            f"{self._absence.said} (for {self._absence.lasted_s:.0f} s; see to it, or the run stops, "
            f"resumable, after patience_seconds = {self._patience_s:g})"
        )

    def now(self) -> float:
        """By the clock that measures patience."""
        return self._clock()

    def outlasted(self, since: float) -> bool:
        """Whether one caller has got no answer since then for longer than the run has patience."""
        return self._clock() - since > self._patience_s

    async def through(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The attempt's result; tried again while the service is away."""
        tries = faults = 0
        stranger_since = math.inf
        while True:
            try:
                result = await attempt()
            except QuartetError as error:
                now = self._clock()
                stranger_since = min(stranger_since, now) if has_no_method(error) else math.inf
                is_stranger = stranger_since <= now < stranger_since + STRANGER_S
                if error.reason in AWAY or error.reason == LOCKED_OUT or is_stranger:
                    self.failed(error.message, _absence_of(error))
                    # An overloaded service says when it wants to be asked again.
                    await asyncio.sleep(max(backoff_s(tries), (error.retry_after_ms or 0) / 1000))
                    tries, faults = tries + 1, 0
                    continue
                self.answered()
                if error.reason == OTHER_RELEASE:
                    raise RunInterrupted(f"{self.service}: {error.message}; then resume the run") from error
                if error.reason != FAULT:
                    raise
                if faults >= MAX_FAULTS:
                    raise RunInterrupted(
                        f"{self.service} failed at it {faults + 1} times in a row: {error.message}; see its "
                        "log, mend that, then resume the run"
                    ) from error
                await asyncio.sleep(FAULT_PAUSE_S)
                faults += 1
            else:
                self.answered()
                return result
