"""The front's connections: how many there may be, and what the HTTP library answers itself on one.

1. One more than there may be is told so, and closed.
2. What never reaches a route is answered in OpenAI's form too, and the connection closed: bytes that are no
   request, which are not quoted (`unreadable`), and what the library refuses, such as an unknown `Expect`.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from quartet.errors import QuartetError
from quartet.kit.unreadable import why

from quartet_inference.openai.errors import OpenAiError, from_quartet


class Connections:
    """Makes the protocols of a server's connections."""

    def __init__(self, server: web.Server, most: int, **settings: Any) -> None:
        """At most so many of them are open; `settings` are aiohttp's, of each."""
        self._server = server
        self._most = most
        self._settings = settings

    def __call__(self) -> asyncio.Protocol:
        """As `create_server` wants it."""
        count = len(self._server.connections)
        if count >= self._most:
            return _Refusing(count)
        return _Connection(self._server, loop=asyncio.get_running_loop(), **self._settings)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what could not be read, or to a fault outside the routes."""
        super().handle_error(request, status, exc, message)  # logs, and raises where an answer has begun
        if isinstance(exc, HttpProcessingError):
            return _last(
                OpenAiError(status, f"the request cannot be read: {why(exc)}", code="invalid_request")
            )
        return _last(from_quartet(QuartetError("INTERNAL", "fault")))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write an answer."""
        if isinstance(resp, web.HTTPException):
            resp = _last(OpenAiError(resp.status, resp.text or resp.reason))
        return await super().finish_response(request, resp, start_time)


def _last(error: OpenAiError) -> web.Response:
    answer = web.json_response(error.body, status=error.status)
    answer.force_close()
    return answer


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
