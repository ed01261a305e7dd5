"""The HTTP server of the front, in the process and on the event loop of the service.

1. A caller that goes away ends its generation.
2. Drains with the service: after the signal new requests get 503, as long as load balancers have to notice;
   then nobody is accepted, and those under way have the server's grace.
3. Connections are bounded, and closed when no request comes by them for IDLE_SECONDS: silence holds no place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog
from aiohttp import web
from quartet.config import ConfigError
from quartet.kit.door import tls_context
from quartet.kit.health import Health
from quartet.kit.server import publish_address
from quartet.kit.unreadable import connection_log

from quartet_inference.openai.config import OpenAiConfig
from quartet_inference.openai.connections import Connections
from quartet_inference.openai.front import Front

#: Longer than a client's own pool keeps them, usually.
IDLE_SECONDS = 75.0
#: Connections that the kernel holds until they are accepted: a burst of clients, not a queue of work.
BACKLOG = 1024

log = structlog.get_logger()


@asynccontextmanager
async def serving(
    front: Front, config: OpenAiConfig, health: Health, grace_s: float, delay_s: float = 0.0
) -> AsyncIterator[str]:
    """Listen until left, or for `delay_s` behind the signal; yields the address. Raises ConfigError."""
    runner = web.AppRunner(
        front.application(),
        handler_cancellation=True,
        shutdown_timeout=grace_s,
    )
    await runner.setup()
    assert runner.server is not None, "it is set up"
    connections = Connections(
        runner.server,
        config.max_connections,
        access_log=None,
        logger=connection_log("quartet_inference.openai"),
        keepalive_timeout=IDLE_SECONDS,
    )
    host, _, port = config.address.rpartition(":")
    tls = tls_context(config.tls, "openai.") if config.tls else None
    try:
        listening = await asyncio.get_running_loop().create_server(
            connections, host.strip("[]"), int(port), ssl=tls, backlog=BACKLOG
        )
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"openai.address = {config.address!r} cannot be bound: {error.strerror}; choose another port"
        ) from None
    address = f"{host}:{listening.sockets[0].getsockname()[1]}"
    if config.port_file is not None:
        try:
            publish_address(config.port_file, address, "openai.port_file")
        except ConfigError:
            listening.close()
            await runner.cleanup()
            raise
    log.info("serving OpenAI's API", address=address)

    left = asyncio.Event()

    async def drain() -> None:
        await health.draining.wait()
        with suppress(TimeoutError):  # left, where somebody is in a hurry
            await asyncio.wait_for(left.wait(), delay_s)
        listening.close()
        await runner.cleanup()

    draining = asyncio.create_task(drain(), name="drain-openai")
    try:
        yield address
    finally:
        left.set()
        if health.draining.is_set():
            await draining
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        listening.close()
        await runner.cleanup()
