"""The HTTP server of the front, in the process and on the event loop of the service.

1. A caller that goes away ends its generation.
2. Drains with the service: after the signal new requests get 503, those under way have the server's grace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from aiohttp import web
from quartet.config import ConfigError
from quartet.kit.health import Health

from quartet_inference.openai.config import OpenAiConfig
from quartet_inference.openai.door import tls_context
from quartet_inference.openai.front import Front

log = structlog.get_logger()


@asynccontextmanager
async def serving(front: Front, config: OpenAiConfig, health: Health, grace_s: float) -> AsyncIterator[str]:
    """Listen until left; yields the address. Raises ConfigError."""
    runner = web.AppRunner(
        front.application(), handler_cancellation=True, access_log=None, shutdown_timeout=grace_s
    )
    await runner.setup()
    host, _, port = config.address.rpartition(":")
    try:
        site = web.TCPSite(
            runner, host.strip("[]"), int(port), ssl_context=tls_context(config.tls) if config.tls else None
        )
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"openai.address = {config.address!r} cannot be bound: {error.strerror}; choose another port"
        ) from None
    address = f"{host}:{runner.addresses[0][1]}"
    if config.port_file is not None:
        config.port_file.write_text(f"{address}\n", encoding="ascii")
    log.info("serving OpenAI's API", address=address)

    async def drain() -> None:
        await health.draining.wait()
        await runner.cleanup()

    draining = asyncio.create_task(drain(), name="drain-openai")
    try:
        yield address
    finally:
        if health.draining.is_set():
            await draining
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await runner.cleanup()
