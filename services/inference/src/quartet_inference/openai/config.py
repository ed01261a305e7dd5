"""Configuration of the front. Imports neither torch nor an HTTP library."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import pydantic
from quartet.config import Config
from quartet.kit.security import ServerTls, is_loopback


class OpenAiConfig(Config):
    """The `openai` table; without an address nothing listens."""

    # "host:port"; port 0 takes any free one.
    address: str = pydantic.Field(default="", pattern=r"^(.+:\d{1,5})?$")
    # One line: the key that every caller sends as a bearer token. Re-read when the file changes.
    api_key_file: Path | None = None
    tls: ServerTls | None = None
    insecure_ok_off_loopback: bool = False
    # The name that requests give as `model`; default: the name of the model's folder.
    model_name: str = ""
    # A request takes no longer, waiting included.
    request_seconds: float = pydantic.Field(default=600.0, gt=0, le=86_400)
    max_concurrent_requests: int = pydantic.Field(default=4096, ge=1)
    # Open connections, idle ones too.
    max_connections: int = pydantic.Field(default=8192, ge=1)
    # The address, once it is bound.
    port_file: Path | None = None

    @pydantic.model_validator(mode="after")
    def _closed_off_loopback(self) -> Self:
        if not self.address or self.insecure_ok_off_loopback or is_loopback(self.address):
            return self
        if self.tls is None:
            raise ValueError(
                f"address = {self.address!r} is off loopback and plaintext; set tls.cert_file and "
                "tls.key_file, or insecure_ok_off_loopback = true on a private network"
            )
        if self.api_key_file is None and self.tls.client_ca_file is None:
            raise ValueError(
                f"address = {self.address!r} is off loopback and lets everybody in; set api_key_file, or "
                "insecure_ok_off_loopback = true on a private network"
            )
        return self
