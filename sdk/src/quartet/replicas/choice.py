"""Which replica a session goes to: rendezvous hashing with bounded loads, numbered ones in turn. Pure.

1. Equal session ids and equal replicas give equal rankings, in every process; a replica that leaves or comes
   moves only the sessions that rank it first.
2. A session id of the form SERIES#N, with a decimal number, is the N-th of its series. Of n replicas each is
   the home of one of every n of them (from kn to kn + n - 1), whoever asks for which of them: clients that do
   not know of each other spread them evenly. After the home the ranking is that of 1. A replica that is known
   keeps its place, offered or not; where one leaves or comes for good, numbered sessions have other homes.
3. A session goes to the first of its ranking that is offered and carries less than its bound of what this
   client has in flight: LOAD_FACTOR times the mean of those offered, and LOAD_SLACK more (NUMBERED_SLACK,
   where it is numbered). One of those offered is always below it.
4. Without a session id the least loaded one is chosen.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Mapping
from typing import Final

import xxhash

# Mirrokni, Thorup, Zadimoghaddam (2018): with 1.25 few sessions are moved and none waits behind a crowd.
LOAD_FACTOR: Final = 1.25
# A group of rollouts shares its prompt, which would be computed again wherever one of them goes alone.
LOAD_SLACK: Final = 16
# These are spread already, so that several groups of one client may share a home; but one of hundreds is too
# much for it.
NUMBERED_SLACK: Final = 64
_NUMBERED: Final = re.compile(r"(.*)#([0-9]{1,18})", re.DOTALL)


def ranking(session_id: str, addresses: Collection[str]) -> list[str]:
    """All replicas, the session's home first."""

    def weight(address: str) -> int:
        return xxhash.xxh3_64_intdigest(f"{session_id}\0{address}".encode())

    ranked = sorted(addresses, key=weight, reverse=True)
    if (numbered := _NUMBERED.fullmatch(session_id)) and ranked:
        row, place = divmod(int(numbered[2]), len(ranked))
        # Each row is turned by chance: of environments that alternate none meets the same replicas for ever.
        turn = xxhash.xxh3_64_intdigest(f"{numbered[1]}\0{row}".encode())
        home = sorted(addresses)[(place + turn) % len(ranked)]
        ranked.remove(home)
        ranked.insert(0, home)
    return ranked


def choose(session_id: str, loads: Mapping[str, int], known: Collection[str] = ()) -> str:
    """The replica for a session among those offered, with what each carries now (at least one); `known`: all
    that have a place, where these are more."""
    if not session_id:
        return min(loads, key=lambda one: (loads[one], random.random()))
    slack = NUMBERED_SLACK if _NUMBERED.fullmatch(session_id) else LOAD_SLACK
    bound = LOAD_FACTOR * (sum(loads.values()) + 1) / len(loads) + slack
    return next(one for one in ranking(session_id, known or loads) if one in loads and loads[one] < bound)
