"""Whether there is a front."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quartet.kit.health import Health

from quartet_inference.answering import Answerer
from quartet_inference.chat import Chat
from quartet_inference.config import InferenceConfig
from quartet_inference.engine import Engine


@asynccontextmanager
async def front(
    config: InferenceConfig, engine: Engine, answerer: Answerer, chat: Chat, health: Health
) -> AsyncIterator[str]:
    """The OpenAI-compatible front, where it is configured; yields its address, or ""."""
    if not config.openai.address:
        yield ""
        return
    from quartet_inference.openai.front import Front  # library.py: it is not everywhere
    from quartet_inference.openai.server import serving

    routes = Front(config.openai, engine, answerer, chat, health, str(config.model))
    server = config.server
    door = serving(routes, config.openai, health, server.drain_seconds, server.drain_delay_seconds)
    async with door as address:
        yield address
