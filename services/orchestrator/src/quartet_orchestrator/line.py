"""The line at the environment hosts: rollouts that were asked for and wait there for a place in a worker.

1. Of a line that has not ended for NOTE_AFTER_S a person reads one note in a run's life in this process: how
   many rollouts are asked of the host, how many can be under way there, and what to raise.
2. From then on it is what keeps the run from more (`troubles`), until no host has told of any for OVER_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quartet.kit.stream import IDLE_TIMEOUT_SECONDS

from quartet_orchestrator.envhosts import SignOfLife
from quartet_orchestrator.trouble import Note

# Groups begin in bursts; a line that is as long as that is there for good.
NOTE_AFTER_S = 60.0
# A host tells of it with every heartbeat.
OVER_S = IDLE_TIMEOUT_SECONDS


class Line:
    """As one run hears of it."""

    def __init__(self, note: Note, clock: Callable[[], float] = time.monotonic) -> None:
        """There is none yet."""
        self._note = note
        self._clock = clock
        # By the clock: since when there is one, and when it was told of last.
        self._since = self._heard_at = -OVER_S
        self._said = ""
        self._noted = False

    @property
    def troubles(self) -> list[str]:
        """How long it is, for a person; none where it is short, or over."""
        is_long = self._heard_at - self._since >= NOTE_AFTER_S
        return [self._said] if is_long and self._clock() - self._heard_at < OVER_S else []

    def heard(self, sign: SignOfLife) -> None:
        """What a host says beside a heartbeat of one group."""
        if not sign.queued or not sign.places:  # it loads the environment, or does not tell
            return
        now = self._clock()
        if now - self._heard_at >= OVER_S:
            self._since = now
        self._heard_at = now
        self._said = (
            f"rollouts wait for places at the environment host at {sign.address}: {sign.asked} are asked of "
            f"it, and {sign.places} can be under way there (workers times rollouts_per_worker of its "
            "configuration); raise these, or add hosts, if inference has room for more"
        )
        if now - self._since >= NOTE_AFTER_S and not self._noted:
            self._noted = True
            self._note(self._said)
