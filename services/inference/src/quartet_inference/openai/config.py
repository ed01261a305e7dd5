"""Configuration of the front. Imports neither torch nor an HTTP library."""

from __future__ import annotations

import re

import pydantic
from quartet.kit.door import HttpDoor

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


class OpenAiConfig(HttpDoor):
    """The `openai` table; without an address nothing listens."""

    #: The name that requests give as `model`; default: the name of the model's folder.
    model_name: str = ""
    #: A request takes no longer, waiting included; of a stream, each next piece.
    request_seconds: float = pydantic.Field(default=600.0, gt=0, le=86_400)
    max_concurrent_requests: int = pydantic.Field(default=4096, ge=1)
    #: Open connections, idle ones too.
    max_connections: int = pydantic.Field(default=8192, ge=1)
    #: Forms of answers that nothing enforces (strict tools, JSON schemas, a tool that has to be called) are
    #: taken as wishes, and not refused.
    best_effort: bool = False
    #: Pages of a browser that may ask, as "https://host:port"; "*" is any page.
    allowed_origins: tuple[str, ...] = ()

    @pydantic.field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin; write scheme://host:port without a path, or *")
        return origins
