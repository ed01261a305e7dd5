"""Bytes that are no request: a line in the log and no traceback; what is answered beside the routes."""

from __future__ import annotations

import asyncio
import json
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
    """A front whose routes have a fault, at once or when the answer has begun."""

    def application(self) -> web.Application:
        async def fault(request: web.Request) -> web.Response:
            raise ValueError("our own")

        async def late(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"begun")
            raise ValueError("our own, later")

        app = web.Application()
        app.router.add_post("/", fault)
        app.router.add_post("/late", late)
        return app


async def received(sent: bytes) -> tuple[bytes, bytes]:
    """Head and body of all that the sender gets before the connection ends."""
    front: Any = Faulty()
    async with serving(front, OpenAiConfig(address="127.0.0.1:0"), Health(), grace_s=1.0) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        async with asyncio.timeout(30):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    return head, body


async def answered(sent: bytes, status: int) -> str:
    """The message of the error that the sender gets, in OpenAI's form."""
    head, body = await received(sent)
    assert b" %d " % status in head and b"Content-Type: application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


async def logged(sent: bytes, status: int, caplog: pytest.LogCaptureFixture) -> tuple[logging.LogRecord, str]:
    """All that is, when the sender has been answered, and the answer."""
    answer = await answered(sent, status)
    [record] = [one for one in caplog.records if one.name in ("quartet_inference.openai", "aiohttp.server")]
    return record, answer


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (HEAD + b"Authorization: Bearer sk-1\x01\r\n\r\n", r"\w.+"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nsk-1\r\n", r"\w.+"),
        (b"GET / HTTP/9.9 sk-1\r\n\r\n", r"\w.+"),
        (b"GET /sk-1" + 10_000 * b"a" + b" HTTP/1.1\r\n\r\n", "Got more than 8190 bytes when reading"),
        (b"GET http://[::1/?key=sk-1 HTTP/1.1\r\nHost: here\r\n\r\n", "Invalid URL"),
        (HEAD + b"Host: sk-1\r\n\r\n", r"Duplicate 'Host' header found\."),
        (
            HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\nsk-1",
            r"\w.+ can't be present with \w.+",
        ),
    ],
)
async def test_bytes_that_are_no_request_are_one_line(
    sent: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """kit/unreadable.py 1, connections.py 2."""
    record, answer = await logged(sent, 400, caplog)
    said = logging.Formatter().format(record)
    assert re.fullmatch(f"the request cannot be read: {why}", answer) and "sk-1" not in answer
    assert re.fullmatch(rf"Error handling request from 127\.0\.0\.1: {why}", said), "and no line more"
    assert "sk-1" not in said and record.levelname == "WARNING"


async def test_a_body_that_cannot_be_read_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """kit/unreadable.py 1: one that nobody asked for, such as that of a caller without a key."""
    packed = b"Host: here\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nsk-1"
    record, _ = await logged(b"POST /nowhere HTTP/1.1\r\n" + packed, 404, caplog)
    said = logging.Formatter().format(record)
    assert said == "Unhandled exception: Can not decode content-encoding: gzip"
    assert record.levelname == "WARNING"


async def test_a_fault_of_our_own_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """kit/unreadable.py 2."""
    record, answer = await logged(HEAD + b"\r\n", 500, caplog)
    assert answer == "the server failed; its log says why"
    assert "ValueError: our own" in logging.Formatter().format(record) and record.levelname == "ERROR"


async def test_an_answer_that_a_fault_cuts_off_is_not_ended(caplog: pytest.LogCaptureFixture) -> None:
    """connections.py: no error is written into it, and its reader sees that it is not whole."""
    head, body = await received(b"POST /late HTTP/1.1\r\nHost: here\r\n\r\n")
    assert b" 200 " in head and body == b"5\r\nbegun\r\n"
    assert "ValueError: our own, later" in caplog.text


async def test_what_the_library_refuses_itself_has_our_form_too() -> None:
    """connections.py 2."""
    assert "Expect" in await answered(HEAD + b"Expect: more\r\n\r\n", 417)
