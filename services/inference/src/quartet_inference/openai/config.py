"""Configuration of the front. Imports neither torch nor an HTTP library."""

from __future__ import annotations

import pydantic
from quartet.kit.door import HttpDoor


class OpenAiConfig(HttpDoor):
    """The `openai` table; without an address nothing listens."""

    # The name that requests give as `model`; default: the name of the model's folder.
    model_name: str = ""
    # A request takes no longer, waiting included.
    request_seconds: float = pydantic.Field(default=600.0, gt=0, le=86_400)
    max_concurrent_requests: int = pydantic.Field(default=4096, ge=1)
    # Open connections, idle ones too.
    max_connections: int = pydantic.Field(default=8192, ge=1)
