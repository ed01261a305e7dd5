"""`python -m quartet_trainer [@ file.toml ...] [--key value ...] [--dry-run | --preflight]`.

One process; or, with `ranks` or started by torchrun, one of several that train together (docs/ranks.md), each
of which dies with torchrun, however that dies (Linux).
"""

from __future__ import annotations

import os
import sys

import uvloop
from quartet.config import ConfigError, main
from quartet.kit import logs
from quartet.kit.accelerator import check_device
from quartet.kit.imports import uncollected
from quartet.kit.server import check_here
from quartet.kit.tracing import exporting
from quartet.local.context_parallel import check_context
from quartet.local.tether import die_with

from quartet_trainer import libraries
from quartet_trainer.config import TrainerConfig
from quartet_trainer.kernels import check as check_kernels
from quartet_trainer.ranks import meeting
from quartet_trainer.state_root import check_state_root


def run(config: TrainerConfig) -> None:
    """Serve. torch is imported here and not before, so that a dry run stays quick and torch-free.

    Errors: ConfigError.
    """
    logs.configure("trainer")
    libraries.configure(config.threads)
    by_torchrun, world = "TORCHELASTIC_RUN_ID" in os.environ, os.environ.get("WORLD_SIZE", "1")
    check_context(config.context_parallel, int(world) if by_torchrun else config.ranks)
    if config.ranks > 1 and not by_torchrun:
        # This process becomes torchrun, and keeps its pid. Whoever supervises it starts it again.
        os.execv(sys.executable, [sys.executable, *meeting.torchrun(config.ranks, sys.argv[1:])])
    if world != "1":
        if not by_torchrun:
            # Alone it would serve a part of what was meant to be one trainer.
            raise ConfigError(
                f"the environment has WORLD_SIZE={world}, but torchrun did not start this process; start it "
                "by torchrun, or unset WORLD_SIZE"
            )
        # Before torch: importing it takes seconds, in which torchrun may die.
        die_with(meeting.torchrun_pid())
        with uncollected():
            from quartet_trainer.ranks.launch import run_ranks

        with exporting("trainer"):
            run_ranks(config)
        return
    with uncollected():
        from quartet_trainer.assembly import run_trainer

    with exporting("trainer"):
        uvloop.run(run_trainer(config))


def preflight(config: TrainerConfig) -> None:
    """Whether this machine lets the trainer start; nothing is made. Raises ConfigError."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return  # a rank: the first may have the port and the folder already
    check_here(config.server)
    check_device(config.device, "device")
    check_state_root(config.state_dir)
    check_kernels(config.liger, config.device)
    if config.losses:
        with uncollected():
            from quartet_trainer.loss.custom import load_losses  # torch, which whoever has none goes without

        load_losses(config.losses)


if __name__ == "__main__":
    sys.exit(main(TrainerConfig, run, preflight=preflight))
