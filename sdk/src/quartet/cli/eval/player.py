"""A policy that this process plays, through `EnvHostService.Interact`."""

from __future__ import annotations

from typing import Protocol

from quartet.config import ConfigError
from quartet.v1.envhost_service_pb2 import ModelAnswer, ModelQuestion


class Player(Protocol):
    """Answers questions, side by side."""

    @property
    def fatal(self) -> ConfigError | None:
        """Why no further question is worth asking: it ends the command, not just a rollout."""

    async def __call__(self, question: ModelQuestion) -> ModelAnswer:
        """One turn. What it raises fails the rollout that asked."""
        ...


class Nobody:
    """Plays nothing: for a host that is only looked at. An async context manager as the others."""

    fatal: ConfigError | None = None

    async def __aenter__(self) -> Nobody:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Nothing is held."""

    async def __call__(self, question: ModelQuestion) -> ModelAnswer:
        """Nobody asks."""
        raise AssertionError("a host that is only looked at asks nothing")
