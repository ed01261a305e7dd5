"""The gateway's door: TLS that follows its files, and bytes that are no request."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from certificates import needs_openssl, write_pair
from quartet_tinker import server
from quartet_tinker.config import GatewayConfig
from quartet_tinker.server import Routes, serving
from structlog.testing import capture_logs

NO_GATEWAY: Any = None  # of which health asks nothing


def config(**more: Any) -> GatewayConfig:
    services = {"trainer": "127.0.0.1:1", "inference": ["127.0.0.1:1"]}
    return GatewayConfig.model_validate({"address": "127.0.0.1:0", **services, **more})


async def test_bytes_that_are_no_request_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """kit/unreadable.py 1."""
    async with serving(Routes(NO_GATEWAY, None), config()) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/9.9 tml-secret\r\n\r\n")
        async with asyncio.timeout(30):
            assert b" 400 " in await reader.readline()
        writer.close()
    (record,) = [one for one in caplog.records if one.name == "quartet_tinker"]
    said = logging.Formatter().format(record)
    assert said.startswith("Error handling request from 127.0.0.1: ") and "\n" not in said
    assert "secret" not in said and record.levelname == "WARNING"


async def test_a_body_that_cannot_be_read_is_its_senders_fault(caplog: pytest.LogCaptureFixture) -> None:
    packed = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    door = serving(Routes(NO_GATEWAY, None), config())
    async with door as address, aiohttp.ClientSession() as session:
        url = f"http://{address}/api/v1/client/config"
        async with session.post(url, data=b"tml-secret", headers=packed) as got:
            said = (got.status, await got.json())
    assert said == (400, {"detail": "the body cannot be read: Can not decode content-encoding: gzip"})
    assert all("\n" not in logging.Formatter().format(one) for one in caplog.records)


async def test_a_sender_that_goes_away_is_no_fault() -> None:
    """Such as a script that is stopped while it sends."""

    async def reads(request: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("Connection lost")  # as aiohttp says it

    with capture_logs() as said:
        await server._answered(make_mocked_request("POST", "/api/v1/optim_step"), reads)
    assert said == []


@needs_openssl
async def test_a_new_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    await asyncio.to_thread(write_pair, tmp_path, "own", "first")
    tls = {"cert_file": tmp_path / "own.crt", "key_file": tmp_path / "own.key"}
    door = serving(Routes(NO_GATEWAY, None), config(tls=tls))
    async with door as address, aiohttp.ClientSession() as session:

        async def status(authority: str) -> int:
            trusting = ssl.create_default_context(cafile=tmp_path / f"{authority}.crt")
            # A connection of its own: one that stands goes on with what it was made with.
            closing = {"Connection": "close"}
            async with session.get(f"https://{address}/api/v1/healthz", ssl=trusting, headers=closing) as got:
                return got.status

        assert await status("first") == 200
        await asyncio.to_thread(write_pair, tmp_path, "own", "second")
        assert await status("second") == 200
        with pytest.raises(aiohttp.ClientSSLError):
            await status("first")
