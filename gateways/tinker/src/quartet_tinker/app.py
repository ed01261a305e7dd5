"""Puts the gateway together, and runs it until a signal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from quartet.kit.channel import connect
from quartet.replicas import Replicas

from quartet_tinker.config import GatewayConfig
from quartet_tinker.door import api_key
from quartet_tinker.gateway import Gateway
from quartet_tinker.sampling import Sampling
from quartet_tinker.server import Routes, serving
from quartet_tinker.trainer import Trainer


@asynccontextmanager
async def running(config: GatewayConfig) -> AsyncIterator[str]:
    """The gateway, until left; yields its address. Raises ConfigError."""
    key = api_key(config)
    async with AsyncExitStack() as stack:
        replicas = Replicas(config.inference, config.inference_security)
        sampling = Sampling(await stack.enter_async_context(replicas))
        channel = connect(config.trainer, security=config.trainer_security)
        trainer = Trainer(await stack.enter_async_context(channel), config.train_seconds)
        gateway = Gateway(config, trainer, sampling)
        stack.push_async_callback(gateway.close)
        tidying = asyncio.create_task(gateway.tidy(), name="close what was left open")
        stack.callback(tidying.cancel)
        sweeping = asyncio.create_task(gateway.sweep(), name="end silent sessions")
        stack.callback(sweeping.cancel)
        yield await stack.enter_async_context(serving(Routes(gateway, key), config))


async def run(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    async with running(config):
        await asked.wait()
