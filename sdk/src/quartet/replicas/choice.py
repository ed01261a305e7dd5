"""Which replica a session goes to: rendezvous hashing with bounded loads. Pure.

1. Equal session ids and equal replicas give equal rankings, in every process; a replica that leaves or comes
   moves only the sessions that rank it first.
2. A session goes to the first of its ranking that is offered and carries less than its bound of what this
   client has in flight: LOAD_FACTOR times the mean of those offered, and LOAD_SLACK more. One of those
   offered is always below it.
3. Without a session id the least loaded one is chosen.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

import xxhash

# Mirrokni, Thorup, Zadimoghaddam (2018): with 1.25 few sessions are moved and none waits behind a crowd.
LOAD_FACTOR: Final = 1.25
# A group of rollouts shares its prompt, which would be computed again wherever one of them goes alone.
LOAD_SLACK: Final = 16


def ranking(session_id: str, addresses: Sequence[str]) -> list[str]:
    """All replicas, the session's home first."""

    def weight(address: str) -> int:
        return xxhash.xxh3_64_intdigest(f"{session_id}\0{address}".encode())

    return sorted(addresses, key=weight, reverse=True)


def choose(session_id: str, loads: Mapping[str, int]) -> str:
    """The replica for a session among those offered, with what each carries now (at least one)."""
    if not session_id:
        return min(loads, key=lambda one: (loads[one], random.random()))
    bound = LOAD_FACTOR * (sum(loads.values()) + 1) / len(loads) + LOAD_SLACK
    return next(one for one in ranking(session_id, list(loads)) if loads[one] < bound)
