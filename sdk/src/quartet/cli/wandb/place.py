"""Weights & Biases as a place where a run is shown (elsewhere/process.py)."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from quartet.cli.elsewhere import child, process
from quartet.cli.elsewhere.child import NO_PACKAGE
from quartet.cli.elsewhere.identity import id_of
from quartet.cli.elsewhere.withheld import settings_of
from quartet.cli.wandb.child import NO_KEY, Plan
from quartet.config import ConfigError
from quartet.run.wandb import WandbConfig
from quartet.v1.orchestrator_service_pb2 import Run


@dataclass(frozen=True)
class WeightsAndBiases:
    """As [wandb] says."""

    config: WandbConfig
    title: str = "Weights & Biases"
    name: str = "wandb"

    @property
    def on(self) -> bool:
        """Whether there is a project, and the environment does not say otherwise."""
        return self.config.mode_in(os.environ) != "disabled"

    def plan(self, folder: Path, run: Run, *, here: bool) -> Plan:
        """How to report a run that is recorded in the folder."""
        config = self.config
        return Plan(
            folder=str(folder.absolute()),
            run_id=id_of(run.run_id, run.submitted_at_ms),
            mode=config.mode_in(os.environ),
            project=config.project or "",
            name=config.name or run.run_id,
            entity=config.entity,
            group=config.group,
            tags=list(config.tags),
            config=settings_of(run),
            completions=config.completions,
            completions_interval=config.completions_interval,
            here=here,
        )

    def environment(self, folder: Path) -> dict[str, str]:
        """What the library would put into the home folder goes into the run's."""
        names = ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR")
        return dict.fromkeys(names, str(folder / "wandb"))

    def done(self, plan: child.Plan, where: str) -> str:
        """Its address, or the command that brings it there."""
        if self.config.mode_in(os.environ) == "online":
            return where
        # Each folder of an offline run holds all of it, so the newest is the one to synchronise.
        for earlier in sorted(Path(plan.folder, "wandb").glob(f"offline-run-*-{plan.run_id}"))[:-1]:
            shutil.rmtree(earlier, ignore_errors=True)
        return f"written down; wandb sync {where}"


@dataclass(frozen=True)
class Lacking:
    """Why a run cannot be reported from here, and what to do: about that, or to the run's file."""

    why: str
    remedy: str
    instead: str


def lacks(config: WandbConfig) -> Lacking | None:
    """What there is not here that reporting needs; nothing is sent."""
    mode = config.mode_in(os.environ)
    if mode == "disabled":
        return None
    # The key's owner would be asked for, over the network, for as long as there is none.
    can, said = process.what_check_says(WeightsAndBiases(config), WANDB_X_DISABLE_VIEWER="true")
    if said == NO_PACKAGE:
        return Lacking(
            "wandb is not installed", "in the repository: pip install './sdk[wandb]'", "remove [wandb]"
        )
    if not can and mode == "online":
        why = "no API key is found" if said == NO_KEY else said
        return Lacking(why, "run 'wandb login', set WANDB_API_KEY", 'set wandb.mode to "offline"')
    return None


def check(config: WandbConfig) -> None:
    """Whether the run can be reported from here; nothing is sent. Raises ConfigError."""
    if (lacking := lacks(config)) is not None:
        raise ConfigError(
            f"wandb.project = {config.project!r} is set, and {lacking.why}; {lacking.remedy}, or "
            f"{lacking.instead}"
        )
