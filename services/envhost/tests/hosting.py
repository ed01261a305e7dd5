"""How tests serve an environment host, and what their environments can be asked to do."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import envhost_service_pb2_grpc
from quartet_envhost.config import EnvHostConfig
from quartet_envhost.host import EnvironmentHost
from quartet_envhost.service import SERVICE_NAME, EnvHostServicer

ENVIRONMENTS = Path(__file__).resolve().parent / "envs"


def modes(package: str) -> tuple[str, ...]:
    """The MODES of an environment under envs/, which this interpreter cannot import: one task for each."""
    tree = ast.parse((ENVIRONMENTS / package / "__init__.py").read_text())
    (found,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODES"
    ]
    names: tuple[str, ...] = ast.literal_eval(found)
    return names


@contextlib.asynccontextmanager
async def serving(settings: dict[str, Any]) -> AsyncIterator[tuple[EnvironmentHost, Any]]:
    """A host behind its service on loopback, and a stub of it."""
    host = EnvironmentHost(EnvHostConfig.model_validate(settings))
    health = Health()
    health.set_ready(SERVICE_NAME)
    add: Any = envhost_service_pb2_grpc.add_EnvHostServiceServicer_to_server
    server = await start([Service(SERVICE_NAME, add, EnvHostServicer(host))], ServerConfig(), health)
    try:
        async with connect(server.address) as channel:
            make_stub: Any = envhost_service_pb2_grpc.EnvHostServiceStub
            yield host, make_stub(channel)
    finally:
        await server.stop(0)
        await host.close()
