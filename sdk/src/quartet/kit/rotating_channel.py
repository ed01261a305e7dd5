"""A channel whose certificates are replaced while it is in use: gRPC's have those that they were made with.

1. A call begins on the channel of the files as they are. They are looked at when a call begins, every
   LOOK_SECONDS at most; halves of a pair leave the channel in use (certificates.py).
2. A call under way is not broken: its channel is closed at the first look after its last call has ended.
3. A connection that stands is given up only for one that stands: where the peer does not take the new
   certificate yet, or shows one of an authority that is not trusted any more, calls go on by the old one,
   also where that has to be made again. Without one that stood they go by the new one.
4. Old channels that have calls are MAX_OLD at most; until one is done, the channel of now stays.
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

#: Certificates live for hours at least; and gRPC's core is not made for others every few milliseconds.
LOOK_SECONDS: Final = 1.0
#: Each is a connection. A stream may last as long as the service, so each rotation may leave one.
MAX_OLD: Final = 16

State = grpc.ChannelConnectivity
_BROKEN: Final = (State.TRANSIENT_FAILURE, State.SHUTDOWN)

Dial = Callable[[grpc.ChannelCredentials], grpc.aio.Channel]


class RotatingChannel(grpc.aio.Channel):  # type: ignore[misc]
    """The channel of now, whichever that is."""

    def __init__(self, credentials: Followed[grpc.ChannelCredentials], dial: Dial) -> None:
        """`dial` makes a channel to the same peer."""
        self._credentials = credentials
        self._dial = dial
        self._now = _Line(dial(credentials.now))
        self._next: _Line | None = None
        self._old: list[_Line] = []
        self._looked_s = monotonic()

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
        if len(self._old) < MAX_OLD and (credentials := self._credentials.renewed()) is not None:
            if self._next is not None:  # which has no calls yet
                background(self._next.channel.close(), name="close-rotated-channel")
            self._next = _Line(self._dial(credentials))
        if self._next is None:
            return
        now, coming = (line.channel.get_state(try_to_connect=True) for line in (self._now, self._next))
        stays = now is State.READY or (now not in _BROKEN and coming is State.TRANSIENT_FAILURE)
        if coming is State.READY or not stays:
            self._old.append(self._now)
            self._now, self._next = self._next, None


class _Line:
    """A channel, and the calls that somebody waits for."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        # Rather than a number of them: a call that is forgotten ends wherever the collector finds it.
        self.calls: WeakSet[Any] = WeakSet()

    @property
    def is_done(self) -> bool:
        """Whether none is under way."""
        return all(call.done() for call in self.calls)
