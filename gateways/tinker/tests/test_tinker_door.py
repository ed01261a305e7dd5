"""The gateway's door: TLS that follows its files."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from certificates import needs_openssl, write_pair
from quartet_tinker.config import GatewayConfig
from quartet_tinker.server import Routes, serving


@needs_openssl
async def test_a_new_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    await asyncio.to_thread(write_pair, tmp_path, "own", "first")
    tls = {"cert_file": tmp_path / "own.crt", "key_file": tmp_path / "own.key"}
    config = GatewayConfig.model_validate(
        {"address": "127.0.0.1:0", "trainer": "127.0.0.1:1", "inference": ["127.0.0.1:1"], "tls": tls}
    )
    no_gateway = cast("Any", None)  # of which health asks nothing
    async with serving(Routes(no_gateway, None), config) as address, aiohttp.ClientSession() as session:

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
