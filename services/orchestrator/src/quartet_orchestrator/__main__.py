"""`python -m quartet_orchestrator [@ file.toml ...] [--key value ...] [--dry-run | --preflight]`."""

from __future__ import annotations

import sys
from pathlib import Path

from quartet.kit.imports import uncollected

with uncollected():
    import structlog
    import uvloop
    from quartet.config import main
    from quartet.kit.folder import check_folder, is_full
    from quartet.kit.health import Health
    from quartet.kit.logs import configure
    from quartet.kit.metrics import scraped
    from quartet.kit.server import Service, check_here, serve
    from quartet.kit.tracing import exporting
    from quartet.v1.orchestrator_service_pb2_grpc import add_OrchestratorServiceServicer_to_server

    from quartet_orchestrator.assembly import Services
    from quartet_orchestrator.config import OrchestratorConfig
    from quartet_orchestrator.gauges import RunGauges
    from quartet_orchestrator.own_advantages import load_advantages
    from quartet_orchestrator.runs import Runs
    from quartet_orchestrator.service import SERVICE_NAME, OrchestratorServicer
    from quartet_orchestrator.together import alongside
    from quartet_orchestrator.watchdog import watch

log = structlog.get_logger()


def check_data_dir(folder: Path) -> None:
    """Whether journals can be there. One that is full is no reason not to start: what is there can be read,
    and deleting it makes room. Raises ConfigError."""
    if is_full(folder):
        log.warning("data_dir is full", folder=str(folder), remedy="make room there, or delete runs")
    else:
        check_folder("data_dir", folder)


async def _serve(config: OrchestratorConfig) -> None:
    check_data_dir(config.data_dir)
    health = Health()
    services = Services.connect(config)
    runs = Runs(config.data_dir / "runs", services, config.goes_on_with)
    service = Service(
        SERVICE_NAME, add_OrchestratorServiceServicer_to_server, OrchestratorServicer(runs, health)
    )
    try:
        runs.start()
        health.set_ready(SERVICE_NAME)
        watching = watch(runs.moving, health, SERVICE_NAME, config.stalled_after_seconds)
        with scraped(RunGauges(runs.glances)):
            await alongside(serve([service], config.server, health), watching)
    finally:
        await runs.close()
        await services.close()


def run(config: OrchestratorConfig) -> None:
    """Serve until a signal ends it."""
    configure("orchestrator", config.log_level)
    with exporting("orchestrator"):
        uvloop.run(_serve(config))


def preflight(config: OrchestratorConfig) -> None:
    """Whether this machine lets the orchestrator start; nothing is made. Raises ConfigError."""
    check_here(config.server)
    check_folder("data_dir", config.data_dir)
    load_advantages(config.advantages)


if __name__ == "__main__":
    sys.exit(main(OrchestratorConfig, run, preflight=preflight))
