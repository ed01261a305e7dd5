"""Keeping up: whether inference serves the version that the trainer published last.

Rollouts of later steps wait for it inside inference, each for as long as it may, and say nothing meanwhile: a
replica that cannot fetch a version, refuses it, or is away would hold a run up without a word.

1. The replicas are asked whether one of them serves the version; of an adapter, once one did, whether one is
   in service and has not refused it since, as asking for it would load it. Where that is not so for
   NOTE_AFTER_S a person reads one note, with what each of them says, and one when it is so again.
2. After `patience_s` of it the run is interrupted: RunInterrupted. Time in which the trainer itself had to be
   brought up again does not count, nor does time in which this process did not run (quartet.kit.awake).
3. A version that no replica can ever serve, because its log-probabilities are no numbers, is waited for by
   nobody: RunFailed.
4. Where one serves it, those that go on saying why they do not are told of, each by one note once that has
   lasted for NOTE_AFTER_S, and by one when it serves the run with nothing to say: the run goes on with fewer
   than it was given.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from quartet.errors import QuartetError
from quartet.kit.awake import awake_s

from quartet_orchestrator.outage import RunFailed, RunInterrupted
from quartet_orchestrator.policies import Standing
from quartet_orchestrator.trouble import Note, Trouble

# A version of a large model takes its time on the way.
NOTE_AFTER_S = 30.0
# Whoever asks is told sooner, and not of every version.
SHOWN_AFTER_S = 5.0
# What each replica says is asked for less often than the version: there may be many.
STANDING_S = 10.0


class KeepingUp:
    """What is known of one run's newest version at the replicas."""

    def __init__(
        self,
        serving: Callable[[int], Awaitable[None]],
        still_serving: Callable[[int], Awaitable[None]],
        never: Callable[[int], Awaitable[str]],
        standing: Callable[[], Awaitable[Mapping[str, Standing]]],
        patience_s: float,
        note: Note,
        clock: Callable[[], float] = awake_s,
    ) -> None:
        """`serving` raises where no replica serves a version, `still_serving` where none does any more;
        `never` says why none will, where that is certain; `standing` is what each replica says by now."""
        self._serving = serving
        self._still_serving = still_serving
        self._never = never
        self._standing = standing
        self._patience_s = patience_s
        self._note, self._clock = note, clock
        # By address, of those that said why they do not serve the newest version.
        self._refusing: dict[str, Trouble] = {}
        self._asked_at: float | None = None
        self._behind = Trouble(note, clock)
        # Whether nobody has found it served since the trainer was away.
        self._is_due = False
        self._seen: int | None = None
        self._asked: int | None = None

    @property
    def trouble(self) -> str:
        """What there is now, and what to do, for a person; empty where inference serves the version, or may
        just be fetching it."""
        if self._behind.lasted_s < SHOWN_AFTER_S:
            return ""
        return (
            f"{self._behind.said} (for {self._behind.lasted_s:.0f} s; see to it, or the run stops, "
            f"resumable, after patience_seconds = {self._patience_s:g})"
        )

    @property
    def is_due(self) -> bool:
        """Whether no replica was found to serve the version since the trainer was away."""
        return self._is_due

    @property
    def refusing(self) -> list[str]:
        """The replicas that a person was told of, as they are now."""
        told = self._refusing.values()
        return [one.said for one in told if one.said and one.lasted_s >= NOTE_AFTER_S]

    def interrupted(self) -> None:
        """The trainer was away, so nobody could fetch: the time begins anew."""
        self._behind.restart()
        self._is_due = True
        self._asked_at = self._clock()  # and they have not heard of it yet

    async def look(self, version: int) -> None:
        """Asks for the version published last. Raises RunInterrupted."""
        if version != self._asked:
            self._asked = version
            self._behind.restart()
        try:
            await (self._still_serving if version == self._seen else self._serving)(version)
        except QuartetError as error:
            if why := await self._never(version):
                raise RunFailed(why) from error
            self._wait(version, error.message)
            return
        self._behind.over(f"inference serves version {version}")
        self._is_due, self._seen = False, version
        if self._asked_at is None or self._clock() - self._asked_at >= STANDING_S:
            self._asked_at = self._clock()
            self._look_around(await self._standing())

    def _look_around(self, seen: Mapping[str, Standing]) -> None:
        for address in self._refusing.keys() - seen.keys():
            del self._refusing[address]  # it has left, or is away
        for address, one in seen.items():
            if one.why:
                trouble = self._refusing.setdefault(address, Trouble(self._note, self._clock))
                behind = "is behind with this run" if one.serves else "does not serve this run"
                said = f"inference at {address} {behind}, others do without it: {one.why}"
                trouble.lasts(said, note_after_s=NOTE_AFTER_S)
            elif one.serves and address in self._refusing:
                self._refusing.pop(address).over(f"inference at {address} serves this run")

    def _wait(self, version: int, why: str) -> None:
        waiting = f"waits for inference to serve version {version}: {why}"
        behind_s = self._behind.lasts(waiting, note_after_s=NOTE_AFTER_S)
        if behind_s > self._patience_s:
            raise RunInterrupted(
                f"inference does not serve version {version} for {behind_s:.0f} s (patience_seconds = "
                f"{self._patience_s:g}): {why}; mend that, then resume the run"
            )
