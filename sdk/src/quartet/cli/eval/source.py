"""Who answers: our inference started here, replicas that run already, or an endpoint."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from quartet.cli.eval.config import AnswererConfig
from quartet.cli.eval.endpoints import ANSWER_SECONDS, Endpoint, endpoint_at, read_endpoints
from quartet.cli.eval.player import Player
from quartet.cli.job import model_path
from quartet.config import ConfigError

#: Of the record: before the address of a replica.
_REPLICA = "grpc://"


@dataclass(frozen=True)
class Source:
    """`folder` is served by the command; else `addresses` are dialled by the host, or `player` is asked."""

    name: str
    folder: str = ""
    addresses: Sequence[str] = ()
    #: Makes the policy that this process plays.
    player: Callable[[], AbstractAsyncContextManager[Player]] | None = None
    endpoint: Endpoint | None = None

    @property
    def base_url(self) -> str:
        """For the record: where the answers came from."""
        if self.endpoint is not None:
            return self.endpoint.url
        return ",".join(f"{_REPLICA}{one}" for one in self.addresses)


def answered_by(base_url: str) -> tuple[str, str | list[str]]:
    """The key that says so where the answers came from, and its value."""
    if base_url.startswith(_REPLICA):
        return "inference_addresses", [one.removeprefix(_REPLICA) for one in base_url.split(",")]
    return "base_url", base_url


def choose(config: AnswererConfig, rollout_seconds: Iterable[float]) -> Source:
    """What the configuration names, for rollouts that may take so long. Raises ConfigError."""
    if config.inference_addresses:
        name = config.model or config.inference_addresses[0]
        return Source(name, addresses=config.inference_addresses)
    return source_of(config.model, config.base_url, config.api_key_var, config.endpoints, rollout_seconds)


def source_of(
    model: str, base_url: str, api_key_var: str, endpoints: Path, rollout_seconds: Iterable[float]
) -> Source:
    """A model at an address, in the file of endpoints, or in a folder. Raises ConfigError."""
    if base_url:
        return asked(model, endpoint_at(base_url, model, api_key_var), rollout_seconds)
    if not model:
        raise ConfigError(
            "no model is named; give --model with a model folder or an id in "
            f"{endpoints}, or --inference-addresses with a running replica"
        )
    known = read_endpoints(endpoints) if endpoints.exists() else {}
    if model in known:
        return asked(model, known[model], rollout_seconds)
    try:
        return Source(model, folder=model_path(model))
    except ConfigError as error:
        there = f"there is none in {endpoints}" if endpoints.exists() else f"there is no file {endpoints}"
        ids = f"{', '.join(sorted(known))} in {endpoints}" if known else there
        others = " Or name" if str(error).endswith("?") else "; or name"
        raise ConfigError(f"{error}{others} an endpoint ({ids})") from None


def asked(name: str, endpoint: Endpoint, rollout_seconds: Iterable[float] = ()) -> Source:
    """An endpoint with every key that it needs, looked up before anything starts."""
    answer_seconds = max((ANSWER_SECONDS, *rollout_seconds))
    if importlib.util.find_spec("openai") is None:
        raise ConfigError("openai is not installed; in the repository: pip install './sdk[eval]'")
    from quartet.cli.eval.openai_policy import OpenAiPolicy

    for replica in endpoint.replicas:
        endpoint.key_of(replica)
    return Source(name, player=lambda: OpenAiPolicy(endpoint, answer_seconds), endpoint=endpoint)
