"""Channels to other services, with the canonical options; id, deadline, token and trace on every call.

1. Two channels per peer where payloads are fetched: `bulk=True` has a connection of its own.
2. Every call carries x-request-id (the one of the request being handled, else a new one) and the token, if
   there is one: where a launcher of this user has a service at the address, that launch's (launched.py), else
   the configured one; and its place in a trace, where traces are on (tracing.py). A channel may be there
   before the launch, and outlive it.
3. A call never outlives the RPC in whose handling it is made, and a unary call always has a deadline.
4. A channel belongs to the event loop it is made on.
5. A certificate that is shown, its key and the authorities that are trusted follow their files; a name that
   nobody has yet is looked for every few seconds (rotating_channel.py).

The calls are wrapped rather than intercepted: the interceptors of grpc.aio copy every message of a stream
through a queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import grpc

from quartet.config import ConfigError
from quartet.kit import context as request_context
from quartet.kit import tracing
from quartet.kit.certificates import Followed
from quartet.kit.launched import token_at
from quartet.kit.options import Options, client_options
from quartet.kit.rotating_channel import RotatingChannel
from quartet.kit.security import (
    ClientSecurity,
    TokenFile,
    check_client,
    client_credentials,
    is_loopback,
    is_name,
)

__all__ = ["ClientSecurity", "connect"]

# For a unary call whose caller gave no timeout: nothing waits for ever.
DEFAULT_UNARY_SECONDS: Final = 60.0
# For a call that was given more, infinity say: gRPC's clock overflows, and it would be over at once.
LONGEST_SECONDS: Final = 1e9
# Between two looks for a launch: a service listens later than this after its launch was announced.
LOOK_SECONDS: Final = 0.2

PLAINTEXT_ON_LOOPBACK: Final = ClientSecurity()


def connect(
    address: str, *, security: ClientSecurity = PLAINTEXT_ON_LOOPBACK, bulk: bool = False
) -> grpc.aio.Channel:
    """A channel to "host:port".

    Connects lazily. Raises ConfigError where plaintext would leave this machine.
    """
    check_client(address, security)
    options = client_options(bulk=bulk, server_name=security.server_name)
    return _Channel(_dialled(address, security, options), address, _Token(address, security))


def _dialled(address: str, security: ClientSecurity, options: Options) -> grpc.aio.Channel:
    def credentials() -> grpc.ChannelCredentials | None:
        return client_credentials(security) if security.encrypted else None

    def dial(made: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
        if made is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, made, options=options)

    files = security.certificate_files()
    if not files and not is_name(address):
        return dial(credentials())
    return RotatingChannel(Followed(files, credentials, security.cert_file), dial)


class _Token:
    """What a channel shows: the token of the launch that has a service at its address, else the given one."""

    def __init__(self, address: str, security: ClientSecurity) -> None:
        """Raises ConfigError where there is no such launch, and the given file cannot be read."""
        self._address = address if is_loopback(address) else None
        self._given: TokenFile | None = None
        self._launched = self._look()
        if security.token_file is not None:
            try:
                self._given = TokenFile(security.token_file)
            except ConfigError:
                if self._launched is None:
                    raise

    def read(self) -> str | None:
        """The token now."""
        if time.monotonic() >= self._look_at:
            self._launched = self._look()
        shown = self._launched or self._given
        return None if shown is None else shown.read()

    def _look(self) -> TokenFile | None:
        self._look_at = time.monotonic() + LOOK_SECONDS
        return None if self._address is None else token_at(self._address)


class _Channel(grpc.aio.Channel):  # type: ignore[misc]
    """A channel whose calls carry the context. Everything else is the wrapped channel's."""

    def __init__(self, inner: grpc.aio.Channel, address: str, token: _Token) -> None:
        self._inner = inner
        self._address = address
        self._token = token

    async def __aenter__(self) -> _Channel:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        await self._inner.__aexit__(exc_type, exc, traceback)

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(method, self._inner.unary_unary(method, *args, **kwargs), DEFAULT_UNARY_SECONDS)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(method, self._inner.unary_stream(method, *args, **kwargs), None)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(method, self._inner.stream_unary(method, *args, **kwargs), None)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(method, self._inner.stream_stream(method, *args, **kwargs), None)

    def _wrap(self, path: str, method: Callable[..., Any], default_s: float | None) -> Callable[..., Any]:
        def call(*args: Any, timeout: float | None = None, metadata: Any = None, **kwargs: Any) -> Any:
            bounded = request_context.bounded(default_s if timeout is None else timeout)
            bounded = None if bounded is None else min(bounded, LONGEST_SECONDS)

            def start(pairs: tuple[tuple[str, Any], ...]) -> Any:
                return method(*args, timeout=bounded, metadata=pairs, **kwargs)

            return tracing.calling(path, self._address, self._metadata(metadata), start)

        return call

    def _metadata(self, given: Any) -> tuple[tuple[str, Any], ...]:
        pairs = tuple(given or ())
        keys = {key for key, _value in pairs}
        if request_context.REQUEST_ID_KEY not in keys:
            pairs += ((request_context.REQUEST_ID_KEY, request_context.request_id()),)
        if "authorization" not in keys and (token := self._token.read()) is not None:
            pairs += (("authorization", f"Bearer {token}"),)
        return pairs
