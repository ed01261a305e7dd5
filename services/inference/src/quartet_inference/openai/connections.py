"""How many may be connected to the front: one more is told so, and closed."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import cast

from aiohttp import web
from quartet.errors import QuartetError

from quartet_inference.openai.errors import from_quartet


class Connections:
    """Makes the protocols of a server's connections."""

    def __init__(self, server: web.Server, most: int) -> None:
        """At most so many of them are open."""
        self._server = server
        self._most = most

    def __call__(self) -> asyncio.Protocol:
        """As `create_server` wants it."""
        count = len(self._server.connections)
        return self._server() if count < self._most else _Refusing(count)


class _Refusing(asyncio.Protocol):
    def __init__(self, count: int) -> None:
        overloaded = QuartetError("OVERLOADED", f"{count} connections are open", retry_after_ms=1000)
        self._error = from_quartet(overloaded)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say why, and close."""
        stream = cast(asyncio.Transport, transport)  # uvloop's is of no class of asyncio
        body = json.dumps(self._error.body).encode()
        status = HTTPStatus(self._error.status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        )
        stream.write(head.encode() + body)
        stream.close()
