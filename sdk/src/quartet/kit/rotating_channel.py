"""A channel that is made again while it is in use: gRPC's have the certificates that they were made with, and
look for a name that they did not find ever more rarely, in the end every two minutes.

1. A call begins on the channel of the files as they are. They are looked at when a call begins, every
   LOOK_SECONDS at most; halves of a pair leave the channel in use (certificates.py).
2. A call under way is not broken: its channel is closed at the first look after its last call has ended.
3. A connection that stands is given up only for one that stands: where the peer does not take the new
   certificate yet, or shows one of an authority that is not trusted any more, calls go on by the old one,
   also where that has to be made again. Without one that stood they go by the new one.
4. Old channels that have calls are MAX_OLD at most; until one is done, the channel of now stays.
5. Beside a channel that reaches nobody another one is tried, every AGAIN_SECONDS for as long as calls begin:
   it looks for the name at once. It takes over when its connection stands; until then calls fail as they did.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from time import monotonic
from typing import Any, Final
from weakref import WeakSet

import grpc

from quartet.kit.certificates import Followed
from quartet.kit.context import background
from quartet.kit.options import MIN_LOOKUP_INTERVAL_MS

#: Certificates live for hours at least; and gRPC's core is not made for others every few milliseconds.
LOOK_SECONDS: Final = 1.0
#: Each is a connection. A stream may last as long as the service, so each rotation may leave one.
MAX_OLD: Final = 16
#: As often as gRPC looks up a name that it has found before (options.py).
AGAIN_SECONDS: Final = MIN_LOOKUP_INTERVAL_MS / 1000

State = grpc.ChannelConnectivity
_BROKEN: Final = (State.TRANSIENT_FAILURE, State.SHUTDOWN)

Dial = Callable[[grpc.ChannelCredentials | None], grpc.aio.Channel]


class RotatingChannel(grpc.aio.Channel):  # type: ignore[misc]
    """The channel of now, whichever that is."""

    def __init__(self, credentials: Followed[grpc.ChannelCredentials | None], dial: Dial) -> None:
        """`dial` makes a channel to the same peer; credentials are None in plaintext."""
        self._credentials = credentials
        self._dial = dial
        self._now = _Line(dial(credentials.now))
        self._next: _Line | None = None
        self._old: list[_Line] = []
        self._looked_s = self._tried_s = monotonic()

    async def __aenter__(self) -> RotatingChannel:
        return self

    async def __aexit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._looked_s = math.inf  # and looks no more
        lines = [self._now, *self._old, *([self._next] if self._next else [])]
        self._old = []
        await asyncio.gather(*(line.channel.close(grace) for line in lines))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._now.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._now.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        while (state := self.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            await self.wait_for_state_change(state)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._following(lambda channel: channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._following(lambda channel: channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._following(lambda channel: channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._following(lambda channel: channel.stream_stream(*args, **kwargs))

    def _following(self, method_of: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        line = self._now
        method = method_of(line.channel)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal line, method
            now_s = monotonic()
            if now_s - self._looked_s >= LOOK_SECONDS:
                self._looked_s = now_s
                self._look()
            if self._now is not line:
                line = self._now
                method = method_of(line.channel)
            begun = method(*args, **kwargs)
            line.calls.add(begun)
            return begun

        return call

    def _look(self) -> None:
        for line in [line for line in self._old if line.is_done]:
            self._old.remove(line)
            background(line.channel.close(), name="close-rotated-channel")
        now = self._now.channel.get_state(try_to_connect=True)
        if len(self._old) < MAX_OLD:
            if (credentials := self._credentials.renewed()) is not None:
                self._try(_Line(self._dial(credentials)))
            elif (
                now is State.TRANSIENT_FAILURE
                and self._looked_s - self._tried_s >= AGAIN_SECONDS
                and (self._next is None or self._next.is_again)
            ):
                self._try(_Line(self._dial(self._credentials.now), is_again=True))
        if self._next is None:
            return
        coming = self._next.channel.get_state(try_to_connect=True)
        in_doubt = now not in _BROKEN and coming is State.TRANSIENT_FAILURE
        stays = self._next.is_again or now is State.READY or in_doubt
        if coming is State.READY or not stays:
            self._old.append(self._now)
            self._now, self._next = self._next, None

    def _try(self, line: _Line) -> None:
        """Let it connect, in the place of another one that was tried, which has no calls yet."""
        if self._next is not None:
            background(self._next.channel.close(), name="close-rotated-channel")
        self._next, self._tried_s = line, self._looked_s


class _Line:
    """A channel, and the calls that somebody waits for."""

    def __init__(self, channel: grpc.aio.Channel, *, is_again: bool = False) -> None:
        self.channel = channel
        #: Whether it was made as the one of now is.
        self.is_again = is_again
        # Rather than a number of them: a call that is forgotten ends wherever the collector finds it.
        self.calls: WeakSet[Any] = WeakSet()

    @property
    def is_done(self) -> bool:
        """Whether none is under way."""
        return all(call.done() for call in self.calls)
