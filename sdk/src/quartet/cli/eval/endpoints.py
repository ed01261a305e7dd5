"""OpenAI-compatible endpoints by name: `configs/endpoints.toml`, in the form that Verifiers users have.

    [[endpoint]]
    endpoint_id = "mini"                      # what --model says
    model = "gpt-4.1-mini"                    # what the endpoint calls it
    url = "https://api.openai.com/v1"
    key = "OPENAI_API_KEY"                    # the environment variable, never the key itself

An id given several times is one endpoint with several replicas; requests go to them in turn.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from quartet.config import Config, ConfigError, load, validate
from quartet.run.values import Text

#: For one answer, at least: rollouts that may take longer wait as long as that (source.py).
ANSWER_SECONDS = 600.0


class EndpointConfig(Config):
    """One entry of the file."""

    endpoint_id: Text
    model: Text
    url: Text
    #: Name of the environment variable that holds the key; empty where none is needed.
    key: str = ""
    type: Literal["openai_chat_completions"] = "openai_chat_completions"
    headers: Annotated[dict[str, str], Field(default_factory=dict)]

    @pydantic.model_validator(mode="before")
    @classmethod
    def _other_names(cls, data: Any) -> Any:
        """Verifiers' longer names of the same keys."""
        longer = {"api_client_type": "type", "base_url": "url", "api_key_var": "key", "id": "endpoint_id"}
        if not isinstance(data, dict):
            return data
        return {key if longer.get(key, key) in data else longer.get(key, key): data[key] for key in data}

    @pydantic.field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError('should be a URL, such as "http://127.0.0.1:8000/v1"')
        return url.rstrip("/")


class EndpointsConfig(Config):
    """The file."""

    endpoint: tuple[EndpointConfig, ...] = ()


@dataclass(frozen=True)
class Endpoint:
    """One or more addresses of equal rank, each with its name of the model."""

    replicas: Sequence[EndpointConfig]

    @property
    def url(self) -> str:
        """Of all replicas."""
        return ",".join(one.url for one in self.replicas)

    def with_model(self, model: str) -> Endpoint:
        """Another model at the same addresses."""
        return Endpoint([one.model_copy(update={"model": model}) for one in self.replicas])

    def key_of(self, replica: EndpointConfig) -> str:
        """The secret itself. Raises ConfigError where the variable is not set."""
        if not replica.key:
            return "none"  # the client library insists on one
        if not (secret := os.environ.get(replica.key)):
            raise ConfigError(
                f"{replica.url} wants the key in the environment variable {replica.key}, which is not set; "
                f"export {replica.key}=..., or name another variable"
            )
        return secret


def read_endpoints(file: Path) -> dict[str, Endpoint]:
    """The endpoints of a file by id. Raises ConfigError."""
    if file.suffix == ".py":
        raise ConfigError(
            f"endpoints = '{file}' is Python; write its entries into a TOML file, as [[endpoint]] with "
            "endpoint_id, model, url and key ('quartet init' writes configs/endpoints.toml)"
        )
    entries = load(EndpointsConfig, ["@", str(file)]).config.endpoint
    found: dict[str, list[EndpointConfig]] = {}
    for entry in entries:
        found.setdefault(entry.endpoint_id, []).append(entry)
    return {name: Endpoint(replicas) for name, replicas in found.items()}


def endpoint_at(url: str, model: str, key: str) -> Endpoint:
    """An endpoint given by hand. Raises ConfigError."""
    # A server on this machine seldom has a key, and then nobody sets the variable.
    local = url.startswith(("http://127.0.0.1", "http://localhost", "http://[::1]"))
    key = "" if local and key not in os.environ else key
    try:
        entry = validate(EndpointConfig, {"endpoint_id": model, "model": model, "url": url, "key": key})
    except ConfigError as error:
        raise ConfigError(f"base_{error}" if error.key == "url" else str(error)) from None
    return Endpoint([entry])
