"""From torchrun's environment to a trainer that serves: the first rank as ever, the others behind it.

1. Told to end, the first rank finishes the job under way and lets the others go; these ignore the signals
   that torchrun sends to all.
2. Errors of the first rank alone (a port in use, a held state_dir) end it, and with it the group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from functools import partial

import structlog
import torch
import uvloop
from quartet.config import ConfigError
from quartet.kit.metrics import scraped
from quartet.kit.server import serve
from quartet.weights.store import WeightStore

from quartet_trainer.assembly import Trainer, assemble, device_of, machine_of
from quartet_trainer.bases import Bases
from quartet_trainer.config import TrainerConfig
from quartet_trainer.machine import Machine
from quartet_trainer.ranks.command import Stop, Wait
from quartet_trainer.ranks.follow import follow
from quartet_trainer.ranks.group import BEAT_SECONDS, Group, leave
from quartet_trainer.ranks.lead import LeadFiles, LeadRun, together
from quartet_trainer.run import Run
from quartet_trainer.spec import RunSpec
from quartet_trainer.state_root import hold, state_root
from quartet_trainer.worker import prepare

log = structlog.get_logger()


def run_ranks(config: TrainerConfig) -> None:
    """Serve, or follow, until told to stop. Errors: ConfigError."""
    device = _own_device(config)
    group = Group(device, config.context_parallel)
    log.info("rank_joined", rank=group.rank, ranks=group.size, device=str(device))
    if not group.first:
        # Before the first rank can serve: a signal to all of them is its to act on, whenever it comes.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    machine = machine_of(config, group, device)
    if group.first:
        uvloop.run(_lead(config, group, machine))
    else:
        prepare(config.threads, config.deterministic)
        follow(group, _maker(machine))
    leave()


def _own_device(config: TrainerConfig) -> torch.device:
    device = device_of(config.device)
    if device.type != "cuda":
        return device
    number, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if number >= devices:
        raise ConfigError(
            f"{os.environ['LOCAL_WORLD_SIZE']} ranks share {devices} CUDA devices; start one for each device"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _maker(machine: Machine) -> Callable[[str, RunSpec], Run]:
    # Nothing is served from here.
    store, bases = WeightStore(1), Bases()

    def make_run(run_id: str, spec: RunSpec) -> Run:
        return Run(run_id, spec, machine, store, lambda: None, bases)

    return make_run


async def _lead(config: TrainerConfig, group: Group, machine: Machine) -> None:
    with hold(state_root(config.state_dir)):
        trainer = assemble(config, machine, partial(LeadRun, group), LeadFiles(group))
        beat = asyncio.create_task(_beat(trainer, group))
        try:
            with scraped(trainer.gauges):
                await serve(trainer.services, config.server, trainer.health)
        finally:
            beat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beat
            await trainer.worker.close(lambda: together(group, Stop(), lambda: None))


async def _beat(trainer: Trainer, group: Group) -> None:
    """Tell the others, while nobody calls, that there is nothing to do."""
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        if not trainer.worker.pending:
            await trainer.worker.run(lambda: together(group, Wait(), lambda: None))
