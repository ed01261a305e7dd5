"""Puts the trainer's parts together from its configuration: the services of one process, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
import torch
import transformers
from quartet.config import ConfigError
from quartet.kit.accelerator import has_driver
from quartet.kit.health import Health
from quartet.kit.metrics import scraped
from quartet.kit.server import Service, serve
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.trainer_service_pb2_grpc import add_TrainerServiceServicer_to_server
from quartet.weights.service import WeightServicer, add_weight_service
from quartet.weights.store import WeightStore

from quartet_trainer.admission import check_run, check_states
from quartet_trainer.bases import Bases
from quartet_trainer.config import TrainerConfig
from quartet_trainer.content import TensorFiles
from quartet_trainer.deletion import Deletion
from quartet_trainer.exported import ExportedModels
from quartet_trainer.gauges import TrainerGauges
from quartet_trainer.intake import Intake
from quartet_trainer.kernels import chosen
from quartet_trainer.loss.custom import load_losses
from quartet_trainer.machine import Machine
from quartet_trainer.model import tell_loading
from quartet_trainer.ranks.alone import Alone, Ranks
from quartet_trainer.roster import Roster
from quartet_trainer.run import Run
from quartet_trainer.service import TrainerServicer
from quartet_trainer.spec import RunSpec
from quartet_trainer.state_root import hold, state_root
from quartet_trainer.states import StateStore
from quartet_trainer.worker import STUCK_SECONDS, Worker

TRAINER = "quartet.v1.TrainerService"
WEIGHTS = "quartet.v1.WeightService"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Trainer:
    """A trainer that is ready to be served."""

    services: tuple[Service, ...]
    worker: Worker
    health: Health
    gauges: TrainerGauges


def machine_of(
    config: TrainerConfig, ranks: Ranks | None = None, device: torch.device | None = None
) -> Machine:
    """What the configuration says about computing. Errors: ConfigError."""
    losses = load_losses(config.losses)
    device = device or device_of(config.device)
    return Machine(
        device,
        config.microbatch_tokens,
        config.row_tokens,
        config.hub,
        config.gradient_checkpointing,
        losses,
        ranks or Alone(),
        chosen(config.liger, device.type),
        config.optimizer_offload and device.type != "cpu",
        config.keep_attention,
    )


def assemble(
    config: TrainerConfig,
    machine: Machine | None = None,
    run_kind: Callable[..., Run] = Run,
    files: TensorFiles | None = None,
) -> Trainer:
    """Build the trainer; needs a running event loop. Errors: ConfigError."""
    # Loading is logged by us; progress bars have no place in a service's log.
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    health = Health()
    tell_loading(health.progress)
    worker = Worker(config.threads, config.deterministic)
    store = WeightStore(config.published_versions)
    bases = Bases()

    machine = machine or machine_of(config)

    def make_run(run_id: str, spec: RunSpec) -> Run:
        run = run_kind(run_id, spec, machine, store, health.progress, bases)
        store.open_run(run_id)
        log.info("run_opened", run_id=run_id, base_model=spec.base_model, device=str(machine.device))
        return run

    root = state_root(config.state_dir)
    states = StateStore(root, config.keep_last, files, health.progress, config.max_states)
    deletion = Deletion(root, states)
    asyncio.get_running_loop().run_in_executor(None, deletion.clear_all)
    roster = Roster(make_run, states, worker, config.max_runs, deletion)

    def check(
        spec: RunSpec, custom_loss: str, custom_args: Mapping[str, object], keep_states: int
    ) -> pb.CheckRunResponse:
        check_states(keep_states, config.max_states)
        return check_run(spec, custom_loss, custom_args, machine)

    health.watch_progress(STUCK_SECONDS, lambda: worker.pending > 0)
    intake = Intake()
    servicer = TrainerServicer(roster, intake, check, ExportedModels(states), health.draining)
    services = (
        Service(TRAINER, add_TrainerServiceServicer_to_server, servicer),
        Service(WEIGHTS, add_weight_service, WeightServicer(store, health.draining)),
    )
    for service in services:
        health.set_ready(service.name)
    return Trainer(services, worker, health, TrainerGauges(roster, intake, worker))


async def run_trainer(config: TrainerConfig) -> None:
    """Serve until told to stop; then finish the job under way."""
    with hold(state_root(config.state_dir)):
        trainer = assemble(config)
        try:
            with scraped(trainer.gauges):
                await serve(trainer.services, config.server, trainer.health)
        finally:
            await trainer.worker.close()


def device_of(wanted: str) -> torch.device:
    """The device that the configuration means. Errors: ConfigError."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            'device = "cuda", but torch finds no CUDA device; set device = "cpu" or mend the driver'
        )
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
        if wanted == "cpu" and has_driver():
            log.warning("no_cuda", why="a GPU's driver is loaded, but this torch finds no CUDA device")
    return torch.device(wanted)
