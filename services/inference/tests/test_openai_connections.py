"""The bound on the front's connections, on the loop that the service runs on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import uvloop
from aiohttp import web
from quartet_inference.openai.connections import Connections

ONE_MORE = b"GET /v1/models HTTP/1.1\r\nHost: here\r\n\r\n"


async def answers(most: int) -> list[bytes]:
    """What each of `most` + 1 connections that ask at the same time is answered."""

    async def ok(request: web.BaseRequest) -> web.Response:
        return web.Response(text="served")

    front = web.Server(ok)
    listening = await asyncio.get_running_loop().create_server(Connections(front, most), "127.0.0.1", 0)
    address = listening.sockets[0].getsockname()
    opened = [await asyncio.open_connection(*address) for _ in range(most + 1)]
    said = []
    async with asyncio.timeout(10):
        for reader, writer in opened:
            writer.write(ONE_MORE)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
            said.append(head + await reader.readexactly(length))
    for _, writer in opened:
        writer.close()
    listening.close()
    await front.shutdown()
    return said


@pytest.mark.parametrize("loop", [asyncio, uvloop], ids=["asyncio", "uvloop"])
def test_one_connection_more_is_told_so(loop: Any) -> None:
    """Invariant 8."""
    *served, refused = loop.run(answers(most=2))
    assert all(one.startswith(b"HTTP/1.1 200") for one in served)
    head, _, body = refused.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429") and b"Retry-After: 1" in head
    assert json.loads(body)["error"]["message"] == "2 connections are open"
