"""`python -m quartet_envhost [@ file.toml ...] [--key value ...] [--dry-run | --preflight]`."""

from __future__ import annotations

import asyncio
import sys

from quartet.kit.imports import uncollected

with uncollected():
    from quartet.config import main
    from quartet.kit.health import Health
    from quartet.kit.logs import configure
    from quartet.kit.metrics import scraped
    from quartet.kit.server import Service, check_here, serve
    from quartet.kit.tracing import exporting
    from quartet.v1.envhost_service_pb2_grpc import add_EnvHostServiceServicer_to_server

    from quartet_envhost.config import EnvHostConfig
    from quartet_envhost.gauges import HostGauges
    from quartet_envhost.host import EnvironmentHost
    from quartet_envhost.service import SERVICE_NAME, EnvHostServicer


async def _serve(config: EnvHostConfig) -> None:
    health = Health()
    host = EnvironmentHost(config, progress=health.progress)
    service = Service(SERVICE_NAME, add_EnvHostServiceServicer_to_server, EnvHostServicer(host))
    health.watch_progress(host.stall_limit_s, host.busy)
    # Who asks for an environment waits for its workers, so the front is ready as soon as it is bound.
    health.set_ready(SERVICE_NAME)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.preload())
        try:
            with scraped(HostGauges(host)):
                await serve([service], config.server, health, on_drain=host.drain)
        finally:
            await host.close()


def run(config: EnvHostConfig) -> None:
    """Serve until a signal ends it."""
    configure("envhost", config.log_level)
    with exporting("envhost"):
        asyncio.run(_serve(config))


if __name__ == "__main__":
    sys.exit(main(EnvHostConfig, run, preflight=lambda config: check_here(config.server)))
