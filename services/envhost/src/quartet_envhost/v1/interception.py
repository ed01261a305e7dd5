"""Verifiers' own request handler, reached without HTTP.

`InterceptionServer.handle_request` is where Verifiers checks limits and stops, runs hooks, calls the model,
commits the turn to the trace and records errors. The in-process harness calls that same code with a request
object instead of a socket: the semantics are Verifiers', the local HTTP hop (some 8 ms of CPU per call) is
gone. The HTTP front stays up beside it for tool servers and for harnesses that run programs.

Pinned to verifiers 0.4.0: it overrides `_client` and calls `_handler_for`, both private.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any, Final

from pydantic_core import to_json
from verifiers.v1.clients import Client, TrainClientConfig
from verifiers.v1.dialects import DIALECTS, ChatDialect
from verifiers.v1.errors import InterceptionError
from verifiers.v1.interception import InterceptionServer

# Never dialled: it marks the sessions whose model is the policy of the current rollout. It is a
# TrainClientConfig because Verifiers relays streams, without tokens, for any other kind.
POLICY_CONFIG: Final = TrainClientConfig(base_url="http://policy.invalid/v1")
CHAT_ROUTE: Final = "/v1/chat/completions"
_CHAT: Final = next(dialect for dialect in DIALECTS if isinstance(dialect, ChatDialect))

# The policy of the rollout that this task runs.
current_policy: ContextVar[Client] = ContextVar("current_policy")
_servers: dict[str, HostInterception] = {}


class _LocalRequest(dict[Any, Any]):
    """What the handler reads of an aiohttp request."""

    def __init__(self, secret: str, body: bytes) -> None:
        super().__init__()
        self.headers = {"Authorization": f"Bearer {secret}"}
        self.path = CHAT_ROUTE
        self.content_length = len(body)
        self._body = body
        self._read_bytes: bytes | None = None

    async def read(self) -> bytes:
        return self._body


class HostInterception(InterceptionServer):  # type: ignore[misc]
    """An interception server whose policy sessions are served by the current rollout's client."""

    async def start(self) -> None:
        """Bring the HTTP side up and register for calls from this process."""
        await super().start()
        self._local = self._handler_for(_CHAT)
        _servers[self.base_url] = self
        self.stack.callback(_servers.pop, self.base_url, None)

    def _client(self, config: Any) -> Client:
        # A role pinned to another endpoint, such as a frozen judge, keeps it.
        return current_policy.get() if config == POLICY_CONFIG else super()._client(config)

    async def post(self, secret: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """One chat completion: HTTP status and body."""
        # A task of its own: the server cancels its handlers' tasks when a session ends.
        response = await asyncio.create_task(self._local(_LocalRequest(secret, to_json(body))))
        return response.status, bytes(response.body or b"")


def local_server(endpoint: str) -> HostInterception:
    """The server behind an endpoint that a harness was given."""
    server = _servers.get(endpoint.removesuffix("/v1"))
    if server is None:
        raise InterceptionError(f"{endpoint} is not served by this process")
    return server
