"""The line at the environment hosts: rollouts that were asked for and wait there for a place in a worker.

1. Of a line that has not ended for NOTE_AFTER_S a person reads one note in a run's life in this process: how
   many rollouts are asked of the host, how many of one environment can be under way, and what to raise.
2. From then on it is what keeps the run from more (`troubles`), until no host has told of any for OVER_S.
3. It is first come first served, whoever waits for whom. So it is told to whoever asks (permits.py 3) how
   many rollouts keep it short, and the places filled: ASKED_FOR_A_PLACE for each place of each environment at
   the hosts that there are, as they say (PLACES at one that has not told; of one MAX_IN_FLIGHT at most, or
   its places for one environment), and MIN_AT_ONCE at least. Places of an environment that nobody asks for
   any more count until the host is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from quartet.kit.stream import IDLE_TIMEOUT_SECONDS
from quartet.run.batch import MIN_AT_ONCE
from quartet.v1 import envhost_service_pb2 as epb

from quartet_orchestrator.envhosts import SignOfLife
from quartet_orchestrator.trouble import Note

# Groups begin in bursts; a line that is as long as that is there for good.
NOTE_AFTER_S = 60.0
# A host tells of it with every heartbeat.
OVER_S = IDLE_TIMEOUT_SECONDS
# One that has it, and one that is there when it ends.
ASKED_FOR_A_PLACE = 2
# What a host has for an environment (workers * rollouts_per_worker), and takes in all, where nobody says
# otherwise. It tells of the first with a heartbeat, of which there are none while rollouts end fast.
PLACES = 256
MAX_IN_FLIGHT = 4096


class Line:
    """As one run hears of it."""

    def __init__(
        self,
        note: Note,
        here: Callable[[], Collection[str]],
        keeps_short: Callable[[int], None] = lambda rollouts: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """There is none yet. `here`: the addresses of the hosts that there are; `keeps_short` hears how many
        rollouts to ask for at once, from now on."""
        self._note = note
        self._here = here
        self._keeps_short = keeps_short
        self._clock = clock
        # By address; by id and args.
        self._places: dict[str, dict[tuple[str, str], int]] = {}
        # By the clock: since when there is one, and when it was told of last.
        self._since = self._heard_at = -OVER_S
        self._said = ""
        self._noted = False
        self._tell()

    @property
    def troubles(self) -> list[str]:
        """How long it is, for a person; none where it is short, or over."""
        is_long = self._heard_at - self._since >= NOTE_AFTER_S
        return [self._said] if is_long and self._clock() - self._heard_at < OVER_S else []

    def heard(self, sign: SignOfLife, environment: epb.EnvironmentRef) -> None:
        """What a host says beside a heartbeat of one group."""
        if sign.places:  # else it loads the environment, or does not tell
            of_host = self._places.setdefault(sign.address, {})
            of_host[environment.id, environment.args_json] = sign.places
        self._tell()
        # Members that pause between two tries have no place, where there are some.
        if not sign.queued or not sign.places or sign.asked <= sign.places:
            return
        now = self._clock()
        if now - self._heard_at >= OVER_S:
            self._since = now
        self._heard_at = now
        self._said = (
            f"rollouts wait for places at the environment host at {sign.address}: {sign.asked} are asked of "
            f"it in all, and {sign.places} of one environment can be under way in its workers that live now "
            "(`workers` of its configuration, each with rollouts_per_worker); raise these, or add hosts, if "
            "inference has room for more"
        )
        if now - self._since >= NOTE_AFTER_S and not self._noted:
            self._noted = True
            self._note(self._said)

    def _tell(self) -> None:
        """Says how many to ask for, as far as the hosts that there are have told."""
        here = self._here()
        self._places = {address: told for address, told in self._places.items() if address in here}
        asked = 0
        for address in here:
            places = [*self._places[address].values()] if address in self._places else [PLACES]
            asked += min(ASKED_FOR_A_PLACE * sum(places), max(MAX_IN_FLIGHT, *places))
        self._keeps_short(max(MIN_AT_ONCE, asked))
