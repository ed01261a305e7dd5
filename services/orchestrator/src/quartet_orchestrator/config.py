"""Configuration of the orchestrator: where it listens, whom it calls, where its journals are."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from quartet.config import Config
from quartet.kit.channel import ClientSecurity
from quartet.kit.security import check_clients
from quartet.kit.server import ServerConfig


class OrchestratorConfig(Config):
    """The orchestrator's own settings; a run's settings come with SubmitRun."""

    server: ServerConfig = ServerConfig()
    #: Empty: there is none, and every run brings its own (`external_trainer`).
    trainer_address: str = ""
    #: Every group goes to one of them. "host:port", or "dns:///name:port" for all that a name has, here and
    #: of inference.
    envhost_addresses: list[str] = Field(min_length=1, max_length=1024)
    #: Asked, before a run samples, whether they serve it; hosts reach the policy by their own configuration.
    #: May be empty, but for runs with an external trainer.
    inference_addresses: list[str] = Field(default_factory=list, max_length=1024)
    #: Teachers that a run's file may name (algorithm.reference.address) and that are shown the token of
    #: `security`, as inference is; one at any other address is called without it.
    teacher_addresses: list[str] = Field(default_factory=list, max_length=1024)
    #: How the services above are called.
    security: ClientSecurity = ClientSecurity()
    #: One folder per run; a run lives as long as its folder.
    data_dir: Path = Path("outputs/orchestrator")
    #: How long a run waits for a service that is away before it stops, resumable.
    patience_seconds: float = Field(default=600.0, gt=0, le=7 * 24 * 3600)
    #: A run's journal that is larger gives up tokens and conversations of rollouts that no saved state needs
    #: for a replay any more (docs/journal.md); those of ckpt.keep_last times ckpt.interval steps stay,
    #: however large they are.
    journal_keep_bytes: int = Field(default=16 << 30, ge=0)
    #: Runs that train the whole model and go on at once; the others wait. More than one needs a replica of
    #: inference for each (its `run_id`). All runs that publish adapters count as one of them.
    whole_model_runs: int = Field(default=1, ge=1, le=64)
    #: A run that writes nothing down for so long makes the service NOT_SERVING. Longer than any rollout and
    #: any call of the trainer: neither shows what it does before it ends.
    stalled_after_seconds: float = Field(default=3600.0, gt=0, le=14 * 24 * 3600)
    #: Advantages of one's own: name = "module:function" (own_advantages.py). A run chooses by name.
    advantages: dict[str, str] = Field(default_factory=dict)
    #: The run that whoever starts this orchestrator is about to go on with (`quartet rl --resume`): until he
    #: has asked for it, it is told to be started again, and not to have come to rest.
    goes_on_with: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _addresses_are_some(self) -> Self:
        if self.trainer_address:
            check_clients("trainer_address", [self.trainer_address], self.security)
        check_clients("envhost_addresses", self.envhost_addresses, self.security)
        check_clients("inference_addresses", self.inference_addresses, self.security)
        return self
