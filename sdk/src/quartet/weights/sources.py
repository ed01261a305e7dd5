"""Fetching a version from relays: the best one that works, and in the end its announcer.

1. A source is passed over for the rest of a fetch when it is gone, silent, starved or slow; the fetch goes on
   at its offset from the next one (quartet.weights.fetch resumes it). The announcer comes last and is never
   passed over.
2. A silent, starved, slow or lying relay is not asked again for SHUNNED_SECONDS, nor is one that was always
   about to begin: one that is frozen, or whose own way is cut, costs its readers one wait, not one for each
   version. While the announcer makes a delta nobody can begin: a relay that waits for that says for how long
   at most, and so do those below it.
3. A relay that lives and says that it will not have the version fails the fetch instead: the trouble is above
   it, and a fresh announcement knows more. If it says so twice in STRIKE_SECONDS it is passed over, and so it
   is where it says so in the middle of a stream: its own fetch failed, and its readers keep what they have.
   One that says so of the newest version that it knows has its weights from elsewhere, and is passed over.
4. A relay's word is not taken for anything: its manifest must have the digest that was announced, and what it
   sends is verified by the fetch.
5. A relay that waits for bytes itself is left where the publisher names others meanwhile: those who wait by
   the tree from before the publisher's restart and those who wait by the new one may wait for each other.
6. Bounded: MAX_CHANNELS connections; every wait on a relay.

For one event loop.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from quartet.config import ConfigError
from quartet.errors import QuartetError, from_rpc
from quartet.kit.channel import ClientSecurity, connect
from quartet.kit.own_log import get_logger
from quartet.weights.arrival import PREPARES, SIGN_SECONDS, is_sign_of_life
from quartet.weights.manifest import mismatch
from quartet.weights.tree import MAX_SOURCES

#: A relay that says nothing for so long is frozen or cut off: it owes a sign of life every SIGN_SECONDS.
SILENT_SECONDS = 5 * SIGN_SECONDS
#: A relay that lives, but has no bytes for so long, waits for what does not come: perhaps, after a restart of
#: the publisher, for its own reader. Longer than it waits for its own source (FETCH_IDLE_SECONDS): where the
#: publisher is slow, its readers must not all run to it.
STARVED_SECONDS = 60.0
#: A relay that is about to begin is waited for so long. Drawn, so that of two that wait for each other (which
#: a restart of the publisher may bring about) one goes on alone.
BEGIN_SECONDS = (15.0, 30.0)
#: A relay that has bytes and sends fewer than this over SLOW_SECONDS is no help.
SLOW_BYTES_PER_SECOND = 1 << 20
SLOW_SECONDS = 10.0
#: Not to stumble over a frozen relay with every version, and to come back to a mended one.
SHUNNED_SECONDS = 60.0
#: Between two refusals of a relay that tell of trouble of its own.
STRIKE_SECONDS = 60.0
#: Twice what one fetch can use, so that no channel in use is closed.
MAX_CHANNELS = 2 * MAX_SOURCES
#: A live relay has none of it, or no more.
GIVEN_UP = frozenset({"VERSION_UNKNOWN", "RUN_UNKNOWN"})
#: What the next version would meet again. A relay that is merely gone is no longer announced by then.
USELESS = frozenset({"DEADLINE", "CHECKSUM_MISMATCH", "UNAUTHENTICATED"})

log = get_logger()


class Relays:
    """The relays that one reader knows: its channels to them, and which of them failed it lately."""

    def __init__(self, security: ClientSecurity) -> None:
        self._security = security
        # Least recently used first.
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._shunned_until: dict[str, float] = {}
        self._struck_at: dict[str, float] = {}

    async def route(self, announcer: grpc.aio.Channel, sources: Sequence[str], digest: bytes) -> Route:
        """A channel for one fetch of the version with this digest."""
        now = time.monotonic()
        self._shunned_until = {at: until for at, until in self._shunned_until.items() if until > now}
        self._struck_at = {at: since for at, since in self._struck_at.items() if since > now - STRIKE_SECONDS}
        usable = self.usable(sources)
        for address in list(self._channels)[: max(0, len(self._channels) + len(usable) - MAX_CHANNELS)]:
            if address not in usable:
                await self._channels.pop(address).close()
        return Route(self, announcer, usable, digest)

    def usable(self, sources: Sequence[str]) -> list[str]:
        """Those of them that are not shunned."""
        return [address for address in sources[:MAX_SOURCES] if address not in self._shunned_until]

    def dial(self, address: str) -> grpc.aio.Channel:
        """The channel to a relay. Raises ConfigError where plaintext would leave this machine."""
        channel = self._channels.pop(address, None)
        self._channels[address] = channel or connect(address, security=self._security, bulk=True)
        return self._channels[address]

    def shun(self, address: str) -> None:
        """Do without a relay for a while."""
        self._shunned_until[address] = time.monotonic() + SHUNNED_SECONDS

    def strike(self, address: str) -> bool:
        """Note that a relay gave a version up; whether it did before, not long ago."""
        again = self._struck_at.pop(address, None) is not None
        if not again:
            self._struck_at[address] = time.monotonic()
        return again

    async def close(self) -> None:
        """Close every channel."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()


@dataclass(slots=True)
class _Pace:
    """How fast a relay is, since it last was fast enough."""

    waited_s: float = 0.0
    bytes: int = 0
    starved: bool = False

    def note(self, waited_s: float, size: int, sign_of_life: bool) -> None:
        """Count a message; DEADLINE where the relay is not worth waiting for."""
        self.waited_s += waited_s
        self.bytes += size
        self.starved |= sign_of_life
        if self.bytes >= SLOW_BYTES_PER_SECOND * SLOW_SECONDS:
            self.waited_s, self.bytes, self.starved = 0.0, 0, False
        elif self.waited_s > (STARVED_SECONDS if self.starved else SLOW_SECONDS):
            raise QuartetError("DEADLINE", f"{self.bytes} bytes in {self.waited_s:.1f} s")


class Route(grpc.aio.Channel):  # type: ignore[misc]
    """A channel whose calls go to the best source that works; made for GetManifest and Fetch."""

    def __init__(
        self, relays: Relays, announcer: grpc.aio.Channel, sources: Sequence[str], digest: bytes
    ) -> None:
        self._relays, self._announcer, self._left, self._digest = relays, announcer, list(sources), digest
        self._passed: set[str] = set()
        #: The relay that was asked last: others may have been named since.
        self.asked = ""
        self._begin_anew()

    def _begin_anew(self) -> None:
        #: Of the relay in use, over all streams.
        self.pace = _Pace()
        self._patience_s = random.uniform(*BEGIN_SECONDS)
        self._waited_s = 0.0
        #: Until when the announcer may prepare what was asked for; infinite where nobody says that it does.
        self._prepared_by = math.inf

    @property
    def relay(self) -> str:
        """The address of the relay in use; empty for the announcer."""
        return self._left[0] if self._left else ""

    @property
    def prepares_s(self) -> float:
        """For how long the announcer may still prepare what was asked for; 0 where that is not known."""
        return 0.0 if self._prepared_by == math.inf else max(0.0, self._prepared_by - time.monotonic())

    def failed(self, relay: str, error: QuartetError, waited_s: float = 0.0, *, torn: bool = False) -> None:
        """Go on with the next source, or with the same if it will have the version soon.

        Raises the error instead where a fresh announcement helps more. `torn`: after the relay had begun.
        """
        if relay != self.relay:
            # Others were named while it was asked: what it was like is not held against these.
            self._begin_anew()
            if error.reason in USELESS:
                self._relays.shun(relay)
                self.go_by(self._left)
            return
        if error.reason == "NOT_READY" and "grpc_code" not in error.metadata:
            # The relay's own words: not those of gRPC for a peer that is gone.
            if (told := error.metadata.get(PREPARES, "")).isdecimal():
                self._prepared_by = min(self._prepared_by, time.monotonic() + int(told[:9]) / 1000)
            self._waited_s += 0.0 if told and self.prepares_s else waited_s
            if self._waited_s < self._patience_s:
                return
        if error.reason in USELESS or self._waited_s >= BEGIN_SECONDS[0]:
            self._relays.shun(relay)
        given_up = error.reason in GIVEN_UP and not torn and not _is_there(error)
        if given_up and not self._relays.strike(relay):
            raise error
        log.info("relay passed over", relay=relay, why=error.message)
        self._passed.add(self._left.pop(0))
        self._begin_anew()

    def go_by(self, sources: Sequence[str]) -> None:
        """These are the sources now, best first; a relay that sends bytes is not left for them."""
        left = [address for address in self._relays.usable(sources) if address not in self._passed]
        if left[:1] != self._left[:1]:
            self._begin_anew()
        self._left = left

    def blame(self, error: QuartetError) -> None:
        """The fetch failed: where what came was damaged, do without the relay that it came from."""
        if self.asked and error.reason in USELESS:
            self._relays.shun(self.asked)

    def channel(self) -> grpc.aio.Channel:
        """The channel of the source in use, which is about to be asked."""
        while self._left:
            self.asked = self._left[0]
            try:
                return self._relays.dial(self._left[0])
            except ConfigError as error:
                self.failed(self._left[0], QuartetError("UNAUTHENTICATED", str(error)))
        self.asked = ""
        return self._announcer

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """A call that goes from source to source; it has to be given one `timeout` for all, in seconds."""

        async def call(request: Any, **options: Any) -> Any:
            deadline = time.monotonic() + options["timeout"]
            while True:
                channel = self.channel()
                relay = self.relay
                began = time.monotonic()
                options["timeout"] = deadline - began
                if not relay:
                    self._prepared_by = deadline
                    try:
                        return await channel.unary_unary(*args, **kwargs)(request, **options)
                    finally:
                        self._prepared_by = math.inf
                if began > deadline:
                    raise QuartetError("DEADLINE", f"relay {relay} did not begin in time")
                bounded = {**options, "timeout": min(options["timeout"], SILENT_SECONDS)}
                try:
                    response = await channel.unary_unary(*args, **kwargs)(request, **bounded)
                    # A delta on the way to the version has a digest of its own; the next one confirms it.
                    if (
                        response.manifest.version != request.version
                        or response.manifest.digest == self._digest
                    ):
                        return response
                    error = mismatch(f"the manifest of {relay}")
                except grpc.RpcError as failure:
                    error = from_rpc(failure)
                self.failed(relay, error, time.monotonic() - began)

        return call

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """A call whose stream goes on with the next source until one has begun to send."""

        def call(request: Any) -> _RoutedStream:
            return _RoutedStream(self, lambda: self.channel().unary_stream(*args, **kwargs)(request))

        return call

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """The announcer's."""
        return self._announcer.stream_unary(*args, **kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """The announcer's."""
        return self._announcer.stream_stream(*args, **kwargs)

    async def __aenter__(self) -> Route:
        return self

    async def __aexit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Nothing: the channels belong to others."""

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """That of the source in use."""
        return self.channel().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Of the source in use when it is called."""
        await self.channel().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits for the source in use when it is called."""
        await self.channel().channel_ready()


class _RoutedStream:
    """One Fetch. Until its first message it moves from source to source; a later failure tears it."""

    def __init__(self, route: Route, start: Callable[[], Any]) -> None:
        self._route, self._start = route, start
        self._call: Any = None
        self._relay = ""
        #: Whether the source in use said anything, and whether any brought bytes.
        self._begun = self._flowing = False

    async def read(self) -> Any:
        """The next message that is not only a sign of life."""
        while True:
            if self._call is None:
                # Starting picks a source, which is then the one in use.
                self._call, self._relay = self._start(), self._route.relay
                self._begun = False
            if not self._relay:
                return await self._call.read()
            began = time.monotonic()
            try:
                message = await self._read_relay()
                self._begun = True
                waits = is_sign_of_life(message)
                self._route.pace.note(time.monotonic() - began, len(message), waits)
                if waits and self._route.relay != self._relay:
                    raise QuartetError("NOT_READY", "waits itself, and others are named now")
            except QuartetError as error:
                self._call.cancel()
                self._call = None
                self._route.failed(self._relay, error, time.monotonic() - began, torn=self._begun)
                if self._flowing:
                    raise QuartetError("NOT_READY", f"relay {self._relay}: {error.message}") from None
                continue
            if not waits:
                self._flowing = True
                return message

    def cancel(self) -> None:
        """Leave the stream."""
        if self._call is not None:
            self._call.cancel()

    async def _read_relay(self) -> bytes:
        """The next message of a relay; DEADLINE where it is silent."""
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                message: bytes = await self._call.read()
        except TimeoutError:
            raise QuartetError("DEADLINE", f"silent for {SILENT_SECONDS:g} s") from None
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        if message is grpc.aio.EOF:
            raise QuartetError("NOT_READY", "the stream ended before WeightEnd")
        return message


def _is_there(error: QuartetError) -> bool:
    """Whether a relay is at the version that it does not hold: no announcement changes that."""
    version = error.metadata.get("version")
    return version is not None and version == error.metadata.get("latest")
