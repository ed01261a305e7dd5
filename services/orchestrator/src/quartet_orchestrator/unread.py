"""Tables of a run's file that mean something to a program that starts services or follows a run, and nothing
to an orchestrator that gets the file."""

from __future__ import annotations

from quartet.run.config import SHOWN, RunConfig

SERVICES = ("trainer", "inference", "envhost", "orchestrator")


def unread(config: RunConfig, run_id: str) -> str:
    """For a person: those that the file has, and who reads them; empty where it has none."""
    told = []
    if services := _named(config, SERVICES):
        told.append(f"{services} (the services are running already, each by its own configuration)")
    if shown := _named(config, SHOWN):
        told.append(f"{shown} (of whoever follows or queues the run, as by quartet watch {run_id} --wandb)")
    return f"not read here: {'; '.join(told)}" if told else ""


def _named(config: RunConfig, keys: tuple[str, ...]) -> str:
    said = [key for key in keys if key in config.model_fields_set and getattr(config, key)]
    return ", ".join(key if key == "keep_rollouts" else f"[{key}]" for key in said)
