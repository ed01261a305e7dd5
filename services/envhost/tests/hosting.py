"""How tests serve an environment host, and what their environments can be asked to do."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import envhost_service_pb2_grpc
from quartet_envhost.config import EnvHostConfig
from quartet_envhost.host import EnvironmentHost
from quartet_envhost.service import SERVICE_NAME, EnvHostServicer
from quartet_envhost.templates import Started, Templates

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


class LastingTemplates(Templates):
    """Templates of hosts that come one after the other: each would import Verifiers again. (What becomes of a
    host's own: test_envhost_templates.py.)
    """

    async def fork(
        self, python: str, environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> Started | None:
        """As it is, but that pytest tells there which test runs: each would have a template of its own."""
        environment = {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
        return await super().fork(python, environment, descriptors)

    async def close(self) -> None:
        """A host ends, and they do not."""

    async def end(self) -> None:
        """After all hosts."""
        await super().close()


def make_host(settings: dict[str, Any], templates: Templates | None = None) -> EnvironmentHost:
    """A host; its workers are forked of `templates`, where these are given, in place of some of its own."""
    host = EnvironmentHost(EnvHostConfig.model_validate(settings))
    if templates is not None:
        assert host._templates is not None, "or its workers would be spawned"
        host._templates = templates
    return host


@contextlib.asynccontextmanager
async def serving(
    settings: dict[str, Any], templates: Templates | None = None
) -> AsyncIterator[tuple[EnvironmentHost, Any]]:
    """A host behind its service on loopback, and a stub of it."""
    host = make_host(settings, templates)
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
