"""`python -m quartet_trainer [@ file.toml ...] [--key value ...] [--dry-run | --preflight]`.

One process; or, with `ranks` or started by torchrun, one of several that train together (docs/ranks.md).
"""

from __future__ import annotations

import asyncio
import os
import sys

from quartet.config import main
from quartet.kit import logs
from quartet.kit.server import check_here

from quartet_trainer.config import TrainerConfig
from quartet_trainer.state_root import check_state_root


def run(config: TrainerConfig) -> None:
    """Serve. torch is imported here and not before, so that a dry run stays quick and torch-free."""
    logs.configure("trainer")
    # Read by OpenMP and cuBLAS once, when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.threads))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if config.ranks > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        # This process becomes torchrun, and keeps its pid. Whoever supervises it starts it again.
        ranks = ["--standalone", "--nproc-per-node", str(config.ranks)]
        command = ["-m", "torch.distributed.run", *ranks, "-m", "quartet_trainer", *sys.argv[1:]]
        os.execv(sys.executable, [sys.executable, *command])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from quartet_trainer.ranks.launch import run_ranks

        run_ranks(config)
        return
    from quartet_trainer.assembly import run_trainer

    asyncio.run(run_trainer(config))


def preflight(config: TrainerConfig) -> None:
    """Whether this machine lets the trainer start; nothing is made. Raises ConfigError."""
    check_here(config.server)
    check_state_root(config.state_dir)


if __name__ == "__main__":
    sys.exit(main(TrainerConfig, run, preflight=preflight))
