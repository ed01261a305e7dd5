"""MLflow as a place where a run is shown (elsewhere/process.py)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from quartet.cli.elsewhere import child, process
from quartet.cli.elsewhere.child import NO_PACKAGE
from quartet.cli.elsewhere.identity import id_of
from quartet.cli.elsewhere.withheld import settings_of
from quartet.cli.mlflow.child import Plan, flat
from quartet.config import ConfigError
from quartet.run.mlflow import MlflowConfig
from quartet.v1.orchestrator_service_pb2 import Run

#: Unless the environment says otherwise. The library would try a server that is away for minutes, and the
#: process is started again anyway; and it would tell its makers of its use.
OTHERWISE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}


@dataclass(frozen=True)
class Mlflow:
    """As [mlflow] says."""

    config: MlflowConfig
    title: str = "MLflow"
    name: str = "mlflow"

    @property
    def on(self) -> bool:
        """Whether there is an experiment."""
        return self.config.experiment is not None

    @property
    def tracking_uri(self) -> str:
        """The server; empty: nobody says which."""
        return self.config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")

    def plan(self, folder: Path, run: Run, *, here: bool) -> Plan:
        """How to tell of a run that is recorded in the folder."""
        return Plan(
            folder=str(folder.absolute()),
            run_id=id_of(run.run_id, run.submitted_at_ms),
            tracking_uri=self.config.tracking_uri or "",
            experiment=self.config.experiment or "",
            name=self.config.name or run.run_id,
            tags={"mlflow.source.name": "quartet", **self.config.tags},
            parameters=flat(settings_of(run)),
        )

    def environment(self, folder: Path) -> dict[str, str]:
        """What the process is told beside its own."""
        return OTHERWISE

    def done(self, plan: child.Plan, where: str) -> str:
        """Its address."""
        return where


def check(config: MlflowConfig) -> None:
    """Whether the run can be told of from here; nothing is sent. Raises ConfigError."""
    place = Mlflow(config)
    if not place.on:
        return
    wanted = f"mlflow.experiment = {config.experiment!r} is set, and"
    if not place.tracking_uri:
        raise ConfigError(
            f"{wanted} nobody says where; set mlflow.tracking_uri to the tracking server's address, or the "
            "variable MLFLOW_TRACKING_URI, or remove [mlflow]"
        )
    can, said = process.what_check_says(place, config.tracking_uri or "")
    if said == NO_PACKAGE:
        raise ConfigError(
            f"{wanted} mlflow is not installed; in the repository: pip install './sdk[mlflow]', or remove "
            "[mlflow]"
        )
    if not can:
        key = "mlflow.tracking_uri" if config.tracking_uri else "the variable MLFLOW_TRACKING_URI"
        raise ConfigError(
            f"{wanted} its library refuses {key} ({said}); give the address of a tracking server, "
            "http://HOST:5000 say, or remove [mlflow]"
        )
