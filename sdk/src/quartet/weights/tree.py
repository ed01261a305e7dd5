"""The tree by which a version spreads: who fetches from whom, so that the publisher sends it about once.

1. The publisher has one child, every relay at most FANOUT, however many watchers there are; watchers that
   serve nobody hang below the relays that have the fewest children.
2. Relays are ordered by joining, and a source always joined before whoever is sent to it: no cycles. Whoever
   loses its watch and comes back within RANK_SECONDS has its place again, so that the order holds among those
   who were sent to each other before and after.
3. The sources of a watcher name, after its parent, who takes the parent's place when that is gone: the
   elder sibling, then upwards. Losing one relay gives the publisher no second child.
4. The tree is made anew for every announcement from the watches that are open then. Watches of one run_id
   form one tree.
"""

from __future__ import annotations

import re
import time
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from quartet.errors import QuartetError

#: Children of one relay: the depth stays logarithmic, and no replica sends more than it received twice.
FANOUT = 2
#: Sources told to one watcher. If all of them are gone it asks the publisher.
MAX_SOURCES = 6
#: Relays of one tree; further ones fetch like watchers that serve nobody. Bounds the work of an announcement.
MAX_RELAYS = 1024
#: Longer than a replica takes to open its watch again, shorter than a new one takes to start at its address.
RANK_SECONDS = 30.0
_ADDRESS = re.compile(r"[^\s/@:\[\]]{1,253}:\d{1,5}|\[[0-9A-Fa-f:.]{2,45}\]:\d{1,5}|unix:[^\s]{1,100}")


@dataclass(frozen=True, slots=True, eq=False)
class Watcher:
    """One open Watch."""

    run_id: str
    #: Where it serves what it holds; empty where it does not.
    address: str
    #: Its place in the order of joining.
    rank: int


class RelayTree:
    """The watches of a publisher. For one event loop."""

    def __init__(self) -> None:
        self._relays: dict[str, list[Watcher]] = {}
        self._leaves: dict[str, list[Watcher]] = {}
        self._ranks = count()
        #: Who left, and when; in the order of leaving.
        self._left: dict[tuple[str, str], tuple[Watcher, float]] = {}

    def join(self, run_id: str, address: str) -> Watcher:
        """Add a watch: last of all, or where it was until just now. Errors: INVALID_REQUEST."""
        if address and not _ADDRESS.fullmatch(address):
            raise QuartetError(
                "INVALID_REQUEST",
                f"relay_address = {address!r} is refused: give host:port, as others reach it, or nothing",
                field="relay_address",
                value=address,
            )
        relays = self._relays.get(run_id, [])
        watcher = Watcher(run_id, address, self._rank(run_id, address))
        groups = self._relays if address and len(relays) < MAX_RELAYS else self._leaves
        insort(groups.setdefault(run_id, []), watcher, key=lambda one: one.rank)
        return watcher

    def _rank(self, run_id: str, address: str) -> int:
        known = self._left.pop((run_id, address), None)
        if address and known and known[1] > time.monotonic() - RANK_SECONDS:
            return known[0].rank
        live = next((one for one in self._relays.get(run_id, []) if one.address == address), None)
        return live.rank if live else next(self._ranks)

    def leave(self, watcher: Watcher) -> None:
        """Take a watch out, when it has ended."""
        for groups in (self._relays, self._leaves):
            group = groups.get(watcher.run_id, [])
            if watcher in group:
                group.remove(watcher)
                if watcher.address:
                    self._left[watcher.run_id, watcher.address] = (watcher, time.monotonic())
                    if len(self._left) > MAX_RELAYS:
                        del self._left[next(iter(self._left))]
                if not group:
                    del groups[watcher.run_id]

    def sources(self, watcher: Watcher) -> list[str]:
        """Addresses to fetch from, best first; none: from the publisher."""
        relays = self._relays.get(watcher.run_id, [])
        if watcher in relays:
            places = _above(relays.index(watcher))
        elif relays:
            # From the last relay backwards: those have no relays below them.
            leaf = self._leaves[watcher.run_id].index(watcher)
            parent = len(relays) - 1 - leaf % len(relays)
            places = iter([parent, *_above(parent)])
        else:
            return []
        # A replica that lost its watch and has a new one may be listed twice: never send it to itself.
        addresses = dict.fromkeys(relays[place].address for place in places)
        addresses.pop(watcher.address, None)
        return list(addresses)[:MAX_SOURCES]


def _above(place: int) -> Iterator[int]:
    """From a place of the tree, row by row: its parent, its elder sibling, and so on from the parent."""
    while place > 0:
        parent = (place - 1) // FANOUT
        yield parent
        eldest = parent * FANOUT + 1
        if place != eldest:
            yield eldest
        place = parent
