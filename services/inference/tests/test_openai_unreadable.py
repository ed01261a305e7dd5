"""Bytes that are no request: a line in the log, and no traceback."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest
from aiohttp import web
from quartet.kit.health import Health
from quartet_inference.openai.config import OpenAiConfig
from quartet_inference.openai.server import serving

HEAD = b"POST / HTTP/1.1\r\nHost: here\r\n"


class Faulty:
    """A front whose only route has a fault."""

    def application(self) -> web.Application:
        async def fault(request: web.Request) -> web.Response:
            raise ValueError("our own")

        app = web.Application()
        app.router.add_post("/", fault)
        return app


async def logged(sent: bytes, status: int, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    """All that is, when the sender has been answered."""
    front: Any = Faulty()
    async with serving(front, OpenAiConfig(address="127.0.0.1:0"), Health(), grace_s=1.0) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        async with asyncio.timeout(30):
            assert b" %d " % status in await reader.readline()
        writer.close()
    [record] = [one for one in caplog.records if one.name in ("quartet_inference.openai", "aiohttp.server")]
    return record


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"Authorization: Bearer sk-1\x01\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nsk-1\r\n",
        b"GET / HTTP/9.9 sk-1\r\n\r\n",
        b"GET /sk-1" + 10_000 * b"a" + b" HTTP/1.1\r\n\r\n",
    ],
)
async def test_bytes_that_are_no_request_are_one_line(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """unreadable.py 1."""
    record = await logged(sent, 400, caplog)
    said = logging.Formatter().format(record)
    assert re.fullmatch(r"Error handling request from 127\.0\.0\.1: \w.+", said), "and no line more"
    assert "sk-1" not in said and record.levelname == "WARNING"


async def test_a_fault_of_our_own_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """unreadable.py 2."""
    record = await logged(HEAD + b"\r\n", 500, caplog)
    assert "ValueError: our own" in logging.Formatter().format(record) and record.levelname == "ERROR"
