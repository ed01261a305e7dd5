"""The replicas of a service as the orchestrator reaches them: a connection to each that there is.

1. "dns:///name:port" is every address that the name has now, looked up again when it was not for LOOKUP_S.
2. A peer that left its name gets nothing new; its connection is closed at a later look, when its last call
   has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity, connect
from quartet.replicas.addresses import Addresses

# A tier that was scaled is noticed within a group or two.
LOOKUP_S = 5.0

Stub = TypeVar("Stub")


@dataclass(eq=False)
class Peer(Generic[Stub]):
    """One address."""

    address: str
    channel: grpc.aio.Channel
    stub: Stub
    calls: int = 0
    #: Rollouts.
    under_way: int = 0
    #: When one of them ended last, well or not.
    ended_at: float = 0.0
    rests_until: float = 0.0
    #: Since when it reaches no replica of inference, as it says.
    blind_since: float | None = None

    @contextmanager
    def called(self) -> Iterator[None]:
        """For as long as a call of it takes."""
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1


class Peers(Generic[Stub]):
    """The peers of one service; one address at least is configured."""

    def __init__(
        self, addresses: Sequence[str], security: ClientSecurity, stub: Callable[[Any], Stub]
    ) -> None:
        """Raises ConfigError."""
        self._addresses = Addresses(addresses, security)
        self._named = ", ".join(addresses)
        self._stub = stub
        self._here: dict[str, Peer[Stub]] = {}
        self._left: list[Peer[Stub]] = []
        self._looking = asyncio.Lock()
        self._looked_at = -LOOKUP_S

    async def now(self) -> list[Peer[Stub]]:
        """Those that there are. Raises QuartetError: NOT_READY while no name has any address."""
        # One looks; whoever knows some addresses meanwhile does not wait for it.
        if self._is_due() and not (self._here and self._looking.locked()):
            async with self._looking:
                if self._is_due():
                    await self._look()
        if not self._here:
            raise QuartetError("NOT_READY", f"{self._named} has no address yet")
        return list(self._here.values())

    @property
    def known(self) -> list[Peer[Stub]]:
        """Those that there were when they were looked up last."""
        return list(self._here.values())

    async def close(self) -> None:
        """Closes every connection; calls under way are cancelled."""
        for peer in (*self._here.values(), *self._left):
            await peer.channel.close()

    def _is_due(self) -> bool:
        changes = self._addresses.change or not self._here
        return changes and time.monotonic() - self._looked_at >= (LOOKUP_S if self._here else 0.0)

    async def _look(self) -> None:
        found = await self._addresses.now()
        self._looked_at = time.monotonic()
        here = {
            address: self._here.get(address) or self._connected(address, security)
            for address, security in found.items()
        }
        # Not one that leaves now: who was told of it may be about to call it.
        idle = [one for one in self._left if not one.calls]
        self._left = [one for one in self._left if one.calls]
        self._left += [peer for address, peer in self._here.items() if address not in found]
        self._here = here
        for peer in idle:
            await peer.channel.close()

    def _connected(self, address: str, security: ClientSecurity) -> Peer[Stub]:
        try:
            channel = connect(address, security=security)
        except ConfigError as error:
            # Its files, in the middle of a rotation: asked again, as one that is away.
            raise QuartetError("NOT_READY", f"{address} cannot be called: {error}") from None
        return Peer(address, channel, self._stub(channel))
