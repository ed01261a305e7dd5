"""The replicas there are now, and the one that a session goes to.

1. The set follows its addresses; a replica that left takes nothing new, and is closed when its last
   completion has ended.
2. `find` waits for a replica that is in service and gives up at its caller's deadline, never later; outside
   of the context manager, where none ever comes, at once.
3. Replicas that are full are passed over while another one is in service; where all are, the wait ends with
   the earliest, spread out so that those who wait do not come back all at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection
from typing import Final

from quartet.config import ConfigError
from quartet.kit.channel import ClientSecurity
from quartet.kit.news import News
from quartet.kit.own_log import get_logger
from quartet.replicas.addresses import Addresses
from quartet.replicas.choice import choose, ranking
from quartet.replicas.replica import Replica, State

# At the start a session waits so long for its home to answer, rather than going to whoever answers first.
SETTLE_SECONDS: Final = 1.0
# Those who wait for a full replica come back within this time after it may have room again.
SPREAD_SECONDS: Final = 0.5

log = get_logger()


class Fleet:
    """Use as an async context manager."""

    def __init__(self, addresses: Addresses, resolve_s: float) -> None:
        """Names are looked up again every `resolve_s`."""
        self._addresses = addresses
        self._resolve_s = resolve_s
        self._replicas: dict[str, Replica] = {}
        self._changed = News()
        self._following: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()  # of those who replace the addresses
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Fleet:
        """Begin to follow. Raises ConfigError where a channel cannot be made."""
        await self.follow(self._addresses)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close every channel."""
        if (following := self._following) is not None:
            self._following = None
            self._changed.tell()  # whoever waits for one
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await asyncio.gather(*self._closing, *(one.close() for one in self._replicas.values()))
        self._replicas.clear()

    @property
    def replicas(self) -> list[Replica]:
        """Those that take new sessions, in service or not."""
        return [one for one in self._replicas.values() if not one.leaving]

    async def follow(self, addresses: Addresses) -> None:
        """From now on these addresses; the last call counts. Raises ConfigError."""
        async with self._turn:
            self._take(await addresses.now())
            if self._following is not None:
                self._following.cancel()
            self._following = asyncio.create_task(self._look_again(addresses), name="follow replicas")

    def in_service(self, but: Collection[str] = ()) -> list[Replica]:
        """Those that can be asked now."""
        return [one for one in self.replicas if one.state is State.SERVING and one.address not in but]

    async def find(self, session_id: str, but: Collection[str], deadline: float) -> Replica | None:
        """The replica for a session, except those named; None when the deadline has passed before one was
        there. Raises RuntimeError where the fleet is not entered, or is left."""
        while True:
            if self._following is None:
                raise RuntimeError("replicas are not followed: ask them inside of 'async with Replicas(...)'")
            left_s = deadline - time.monotonic()
            changed = self._changed.next
            offered = self.in_service(but)
            room = [one for one in offered if not one.full]
            wait_s = left_s
            if offered and not room:
                wait_s = min(one.refused_until for one in offered) - time.monotonic()
                wait_s += random.uniform(0, SPREAD_SECONDS)
            elif room:
                settle_s = self._settle_s(session_id, but)
                if min(settle_s, left_s) <= 0:
                    loads = {one.address: one.in_flight for one in room}
                    known = [one.address for one in self.replicas]
                    return self._replicas[choose(session_id, loads, known)]
                wait_s = settle_s
            if left_s <= 0:
                return None
            try:
                async with asyncio.timeout(min(left_s, wait_s)):
                    await changed.wait()
            except TimeoutError:
                continue

    def _settle_s(self, session_id: str, but: Collection[str]) -> float:
        """How long to wait still for a home that has not said anything yet."""
        if not session_id or all(one.state is not State.NEW for one in self._replicas.values()):
            return 0.0
        known = {one.address: one for one in self.replicas}
        home = known[next(one for one in ranking(session_id, known) if one not in but)]
        return home.since + SETTLE_SECONDS - time.monotonic() if home.state is State.NEW else 0.0

    async def _look_again(self, addresses: Addresses) -> None:
        while addresses.change:
            await asyncio.sleep(self._resolve_s)
            try:
                self._take(await addresses.now())
            except ConfigError as error:  # a certificate is being replaced; those there are go on
                log.warning("new replicas cannot be reached", why=str(error))

    def _take(self, now: dict[str, ClientSecurity]) -> None:
        for address, security in now.items():
            if address in self._replicas:
                self._replicas[address].leaving = False
            else:
                self._replicas[address] = Replica(address, security, self._note)
        for address, replica in self._replicas.items():
            replica.leaving = address not in now
        self._note()

    def _note(self) -> None:
        """Something may be chosen differently: close who has left, wake who waits."""
        for replica in [one for one in self._replicas.values() if one.leaving and not one.in_flight]:
            del self._replicas[replica.address]
            task = asyncio.create_task(replica.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        self._changed.tell()
