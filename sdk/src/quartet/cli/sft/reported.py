"""A fine-tuning where runs are shown: what of it the reporters of a run (cli/reporting.py) are given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from quartet.cli import exits
from quartet.cli.elsewhere.child import STOPPED_CODE, Ending
from quartet.cli.progress import phase_name
from quartet.cli.reporting import Reporters
from quartet.cli.sft.place import begun_ms
from quartet.cli.summary import installed_versions
from quartet.local.toml_text import dumps
from quartet.run.sft import SftConfig
from quartet.v1.orchestrator_service_pb2 import RUN_PHASE_COMPLETED, RUN_PHASE_STOPPED, Run

TICK_SECONDS = 0.5


def run_of(folder: Path, config: SftConfig) -> Run:
    """As which the fine-tuning of a folder is shown: a run that is called as the folder is."""
    shown = {"trainer", "wandb", "mlflow", "tensorboard"}
    values = config.model_dump(mode="json", exclude=shown, exclude_none=True)
    return Run(run_id=folder.name, submitted_at_ms=begun_ms(folder), config_toml=dumps(values))


def ending_of(config: SftConfig, steps: int, *, stopped: bool = False) -> Ending:
    """What is said of a fine-tuning at its end, or where it was stopped."""
    summary = {
        "phase": phase_name(RUN_PHASE_STOPPED if stopped else RUN_PHASE_COMPLETED),
        "steps": steps,
        "seed": config.seed,
        "model": config.model,
        "versions": installed_versions(),
    }
    return Ending(STOPPED_CODE if stopped else exits.DONE, summary)


@asynccontextmanager
async def looked_at(reporter: Reporters) -> AsyncIterator[None]:
    """While inside, the reporters are looked at from time to time."""

    async def look() -> None:
        while True:
            reporter.tick()
            await asyncio.sleep(TICK_SECONDS)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
