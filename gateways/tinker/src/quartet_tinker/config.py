"""Configuration of the gateway. Imports no HTTP library."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

import pydantic
from quartet.config import Config
from quartet.kit.door import HttpDoor
from quartet.kit.security import ClientSecurity, check_clients


class AdamConfig(Config):
    """The constants that a run begins with, and keeps if its first step gives them. Default: the SDK's."""

    beta1: float = pydantic.Field(default=0.9, ge=0, lt=1)
    beta2: float = pydantic.Field(default=0.95, ge=0, lt=1)
    eps: float = pydantic.Field(default=1e-12, gt=0)
    weight_decay: float = pydantic.Field(default=0.0, ge=0)
    grad_clip_norm: float = pydantic.Field(default=0.0, ge=0)


class GatewayConfig(HttpDoor):
    """Where the gateway listens, and whose client it is."""

    # The trainer, "host:port".
    trainer: str
    trainer_security: ClientSecurity = ClientSecurity()
    # The replicas, "host:port" or "dns:///name:port". They must take adapters of this trainer (docs/lora.md).
    inference: list[str] = pydantic.Field(min_length=1)
    inference_security: ClientSecurity = ClientSecurity()
    # Where scripts find the gateway: TINKER_BASE_URL=http://ADDRESS. Port 0 takes any free one.
    address: str = pydantic.Field(default="127.0.0.1:8010", min_length=1)
    # One line that begins with "tml-", as the SDK wants it: what callers must have as TINKER_API_KEY. Re-read
    # when the file changes. Without it every key is accepted.
    api_key_file: Path | None = None
    # The model as the trainer finds it: a folder of its machine or a hub id; default: what inference serves.
    model: str = ""
    # The name that scripts give as base_model; default: model.
    model_name: str = ""
    # The hub id or folder from which scripts load the tokenizer; default: model.
    tokenizer: str = ""
    # A run whose first step comes after more gradients than are kept (MAX_REPLAY_BYTES) keeps these.
    adam: AdamConfig = AdamConfig()
    # Where what defines each run is noted, so that a gateway started later finds the runs of this one;
    # without it their saved states cannot be loaded after a restart.
    runs_dir: Path | None = None
    # A session whose script is silent for so long is ended, its runs are closed: what is not saved is lost.
    session_seconds: float = pydantic.Field(default=3600.0, ge=30, le=604_800)
    # The SDK is heard every 10 s. A run whose script is silent for so long may be taken by another script.
    takeover_seconds: float = pydantic.Field(default=30.0, ge=1, le=3600)
    # One call of the trainer: a forward or backward pass of one request.
    train_seconds: float = pydantic.Field(default=3600.0, gt=0, le=86_400)
    # One sampling request, waiting included.
    sample_seconds: float = pydantic.Field(default=1800.0, gt=0, le=86_400)
    # How long published weights may take until a replica answers with them.
    publish_seconds: float = pydantic.Field(default=300.0, gt=0, le=86_400)
    # What a sampling client gets once later weights of its run are published: a refusal, or the answer of the
    # newest. Log-probabilities are those of whoever answered.
    replaced_samplers: Literal["refused", "newest"] = "refused"
    # A request whose predecessor never comes is given up after that, and its run's later requests with it.
    gap_seconds: float = pydantic.Field(default=120.0, gt=0, le=3600)
    max_sessions: int = pydantic.Field(default=256, ge=1, le=65_536)
    # Sampling requests under way; more are told to come later.
    max_samples: int = pydantic.Field(default=2048, ge=1, le=65_536)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @pydantic.field_validator("inference", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    @pydantic.model_validator(mode="after")
    def _addresses_are_some(self) -> Self:
        check_clients("trainer", [self.trainer], self.trainer_security)
        check_clients("inference", self.inference, self.inference_security)
        return self
