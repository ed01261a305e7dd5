"""summary.json of a run's folder: what the last part of the run said at its end."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from quartet.cli.progress import ledger_dict, phase_name
from quartet.local.wiring import SERVICES
from quartet.run.config import RunConfig
from quartet.v1.orchestrator_service_pb2 import RUN_PHASE_COMPLETED, Run

SUMMARY = "summary.json"
#: What the agents of each role earned, by environment (progress.py).
Agents = Mapping[str, Mapping[str, float]]
PACKAGES = ("quartet", *(f"quartet-{name}" for name in SERVICES), "torch", "transformers", "grpcio")


def summed_up(
    run_id: str,
    config: RunConfig,
    run: Run,
    *,
    step: int,
    wall_seconds: float,
    restarts: Mapping[str, int],
    notes: Iterable[str] = (),
    agents: Mapping[int, Agents] = MappingProxyType({}),
) -> dict[str, Any]:
    """What the file says. `step`: the last that the run's events have told; `restarts`: of each service;
    `notes`: the last that the run said of itself, in the parts before a --resume, too; `agents`: of the
    evaluation after so many steps."""
    return {
        "run_id": run_id,
        "phase": phase_name(run.phase),
        "reward_before": run.reward_before if run.HasField("reward_before") else None,
        "reward_after": run.reward_after if run.HasField("reward_after") else None,
        "agents_before": agents.get(0, {}),
        "agents_after": agents.get(run.step, {}) if run.HasField("reward_after") else {},
        # Of a run that could not be stopped in order, its events know more.
        "steps": max(run.step, step),
        # With the parts before a --resume, but for one that left no summary: its launcher was killed.
        "wall_seconds": round(wall_seconds, 3),
        "rollouts": run.ledger.dispatched,
        "max_off_policy_steps_seen": run.max_off_policy_steps_seen,
        "max_logprob_difference": run.max_logprob_difference
        if run.HasField("max_logprob_difference")
        else None,
        "ledger": ledger_dict(run.ledger),
        "environments": environment_rows(config, run),
        "restarts": dict(restarts),
        "notes": list(notes),
        "seed": config.seed,
        "model": config.model,
        "versions": installed_versions(),
    }


def environment_rows(config: RunConfig, run: Run) -> list[dict[str, Any]]:
    """The run's environments, those of its evaluations last, by what it calls them; none where the
    orchestrator is of a release that did not tell."""
    named = [*(one.label for one in config.env), *(f"eval: {one.label}" for one in config.eval.env)]
    return [
        {
            "name": name,
            "id": one.id,
            "version": one.version,
            "digest": one.digest,
            "later_digests": list(one.later_digests),
        }
        for name, one in zip(named, run.environments, strict=False)
    ]


def summary_of(folder: Path) -> dict[str, Any]:
    """What the last part of a run said; empty where it came to no end."""
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    except (OSError, ValueError):
        return {}
    return summary


def is_completed(summary: dict[str, Any], max_steps: int) -> bool:
    """Whether a summary is that of a run which has come to the end of so many steps."""
    return (summary.get("phase"), summary.get("steps")) == (phase_name(RUN_PHASE_COMPLETED), max_steps)


def installed_versions() -> dict[str, str]:
    """Versions of what took part, from package metadata."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
