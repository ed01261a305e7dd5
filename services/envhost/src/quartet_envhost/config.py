"""Configuration of the environment host.

1. Every interpreter named here exists and is executable before anything starts (`--dry-run` checks the same).
2. With an empty `environments` table every environment that the default interpreter has installed is
   hosted; with entries, those and no others.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from typing import Final, Literal, Self

from packaging.version import InvalidVersion, Version
from pydantic import Field, JsonValue, field_validator, model_validator
from quartet.config import Config, ConfigError
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity
from quartet.kit.server import ServerConfig
from quartet.replicas.addresses import Addresses
from quartet.run.hosted import BUILT_IN, MAX_TIMEOUT_SECONDS, MIN_TIMEOUT_SECONDS

#: "owner/my-env@latest" is whatever is installed.
LATEST: Final = "latest"
# A worker, or a tool server that all its rollouts share, that says nothing for so long hangs.
STALL_S: Final = 60.0


class EnvironmentConfig(Config):
    """Where one environment runs."""

    #: Interpreter that has verifiers, quartet-envhost and the environment installed; empty: the host's
    #: default.
    python: str = ""
    #: Worker processes; 0: the host's default. One saturates one core.
    workers: int = Field(default=0, ge=0, le=256)
    #: Rollouts under way in one worker at once; 0: the host's default.
    rollouts_per_worker: int = Field(default=0, ge=0, le=4096)
    #: Limits of one worker with everything that it starts, as below; 0: the host's.
    max_memory_gb: float = Field(default=0, ge=0, allow_inf_nan=False)
    max_processes: int = Field(default=0, ge=0)
    max_file_gb: float = Field(default=0, ge=0, allow_inf_nan=False)
    #: Variables added to the worker's environment, such as the key of a judge.
    env: dict[str, str] = Field(default_factory=dict)

    @field_validator("python")
    @classmethod
    def _python_exists(cls, value: str) -> str:
        return checked_interpreter(value) if value else value


class PreloadConfig(Config):
    """An environment as somebody is going to ask for it."""

    id: str = Field(min_length=1)
    args: dict[str, JsonValue] = Field(default_factory=dict)


class EnvHostConfig(Config):
    """The host's own settings; `[environments."id"]` tables override the defaults for one environment."""

    server: ServerConfig = ServerConfig()
    #: Where the policy is served: "host:port" of each replica, or "dns:///name:port" for all that a name has.
    #: A group stays at one replica as long as that serves.
    inference_addresses: list[str] = Field(default_factory=list, max_length=1024)
    #: No inference at all: only Interact, whose callers are the policy. RunRollouts is refused.
    interact_only: bool = False
    inference_security: ClientSecurity = ClientSecurity()
    #: Default interpreter of environments.
    python: str = sys.executable
    workers: int = Field(default=1, ge=1, le=256)
    rollouts_per_worker: int = Field(default=256, ge=1, le=4096)
    environments: dict[str, EnvironmentConfig] = Field(default_factory=dict)
    #: Environments whose workers start with the host; those of any other start when it is first asked for.
    preload: list[PreloadConfig] = Field(default_factory=list, max_length=1024)
    #: Rollouts accepted and not yet finished, over all environments; more are refused as OVERLOADED.
    max_in_flight: int = Field(default=4096, ge=1, le=1_000_000)
    #: Distinct (id, args) pairs that may have workers at once; an idle one makes room for a new one.
    max_loaded: int = Field(default=16, ge=1, le=1024)
    #: Limit of one rollout with its scoring where the request sets none.
    timeout_seconds: float = Field(default=600.0, ge=MIN_TIMEOUT_SECONDS, le=MAX_TIMEOUT_SECONDS)
    #: Time an environment has to import and load its data, Verifiers with it.
    load_timeout_seconds: float = Field(default=300.0, gt=0)
    #: Workers are forks of a process that has imported Verifiers, where that can be (templates.py); else each
    #: imports it for itself.
    fork_workers: bool = True
    #: A worker whose event loop is silent for so long is stopped, and its rollouts fail as HOST; so is one of
    #: which a shared tool server is.
    stall_seconds: float = Field(default=STALL_S, gt=0)
    #: Time after a rollout's deadline in which its worker must have ended it; then the worker is stopped.
    deadline_grace_seconds: float = Field(default=5.0, gt=0)
    #: What one worker may hold with everything that it starts; looked at every second, and a worker over it
    #: is stopped. Far above what an environment needs: they are there for one that runs away.
    max_memory_gb: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    max_processes: int = Field(default=512, ge=1)
    #: The largest file that a worker may write; a write beyond it is an error in the environment.
    max_file_gb: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("python")
    @classmethod
    def _python_exists(cls, value: str) -> str:
        return checked_interpreter(value)

    @model_validator(mode="after")
    def _addresses_are_safe(self) -> Self:
        if self.interact_only == bool(self.inference_addresses):
            raise ValueError(
                "inference_addresses: name where the policy is served, or else set interact_only = true"
            )
        if not self.interact_only:
            try:
                Addresses(self.inference_addresses, self.inference_security)
            except ConfigError as error:
                raise ValueError(f"inference_addresses: {error}") from None
        return self

    def environment(self, env_id: str) -> EnvironmentConfig | None:
        """The settings of an environment with every default filled in; None where it is not hosted here."""
        wanted = canonical_id(env_id)
        found = next((one for name, one in self.environments.items() if canonical_id(name) == wanted), None)
        if found is None:
            if self.environments:
                return None
            found = EnvironmentConfig()
        return EnvironmentConfig.model_construct(
            python=found.python or self.python,
            workers=found.workers or self.workers,
            rollouts_per_worker=found.rollouts_per_worker or self.rollouts_per_worker,
            max_memory_gb=found.max_memory_gb or self.max_memory_gb,
            max_processes=found.max_processes or self.max_processes,
            max_file_gb=found.max_file_gb or self.max_file_gb,
            env=found.env,
        )


def how_to_install(python: str) -> str:
    """The command that gives an interpreter what a worker needs; for whoever is in the repository."""
    return f"{python} -m pip install ./sdk './services/envhost[verifiers]' (or [verifiers-classic])"


def canonical_id(env_id: str) -> str:
    """The name under which Verifiers imports "owner/my-env@1.0": my_env."""
    return env_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def is_built_in(env_id: str) -> bool:
    """Whether the host itself is what runs it: it is no package, and needs no Verifiers."""
    return canonical_id(env_id) in BUILT_IN


def wanted_version(env_id: str) -> str:
    """What "owner/my-env@1.0" says of the version; empty where any will do."""
    wanted = env_id.rpartition("/")[2].partition("@")[2]
    return "" if wanted == LATEST else str(_version(wanted))


def distribution_version(env_id: str) -> str:
    """The version of the environment's package in this interpreter; empty where it is a bare module."""
    name = env_id.rsplit("/", 1)[-1].split("@", 1)[0]
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_version(env_id: str) -> None:
    """Refuse an id that names another version than the one in this interpreter; a bare module has none.

    Errors: INVALID_CONFIG.
    """
    wanted, installed = wanted_version(env_id), distribution_version(env_id)
    if not installed or not wanted or _version(installed) == _version(wanted):
        return
    remedy = f"install {wanted} into {sys.executable}, or leave out '@{wanted}'"
    raise QuartetError(
        "INVALID_CONFIG",
        f"environment {env_id!r} is there in version {installed}; {remedy}",
        key="id",
        value=env_id,
        remedy=remedy,
    )


def _version(text: str) -> Version | str:
    """Comparable; as it is written where it is none."""
    try:
        return Version(text)
    except InvalidVersion:
        return text


def checked_interpreter(value: str) -> str:
    """The interpreter's absolute path, symlinks kept (a virtual environment is found through them)."""
    expanded = os.path.expanduser(value)
    found = shutil.which(expanded)
    if found is None:
        why = "is not executable" if os.path.exists(expanded) else "does not exist"
        raise ValueError(
            f"interpreter {value!r} {why}; name a Python that has quartet-envhost and verifiers installed, "
            "0.4 or for classic packages 0.3"
        )
    return os.path.abspath(found)
