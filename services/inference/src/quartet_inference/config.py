"""Configuration of the inference service. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic
from quartet.config import Config
from quartet.kit.security import ClientSecurity
from quartet.kit.server import ServerConfig

GIB = 1 << 30
#: The prompt's ids travel in one message of at most 4 MiB, at up to 5 bytes each and beside the text.
MAX_MODEL_LEN = 262_144


class EmbeddedConfig(Config):
    """The embedded engine."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    # Threads of one operation. More than one pays only on cores that nobody else uses.
    threads: int = pydantic.Field(default=1, ge=1, le=256)
    max_num_seqs: int = pydantic.Field(default=128, ge=1, le=4096)
    max_waiting: int = pydantic.Field(default=4096, ge=1, le=1_000_000)
    kv_cache_bytes: int = pydantic.Field(default=GIB, ge=1 << 16)
    prefix_cache_bytes: int = pydantic.Field(default=GIB // 8, ge=0)
    # What happens to the keys and values of running requests when weights change: "recompute" makes
    # every later token
    # comparable with a plain forward pass of its version; "keep" is cheaper and mixes the versions' keys.
    kv_on_update: Literal["keep", "recompute"] = "recompute"


class InferenceConfig(Config):
    """The inference service."""

    model: Path
    engine: Literal["embedded"] = "embedded"
    # The trainer's WeightService; empty serves the folder's own weights as version 0 of no run.
    weights_address: str = ""
    weights_security: ClientSecurity = ClientSecurity()
    # The run to follow; empty follows the run that the trainer created last.
    run_id: str = ""
    # Longest prompt plus completion; default: what the model was made for.
    max_model_len: int | None = pydantic.Field(default=None, ge=2, le=MAX_MODEL_LEN)
    # A request that waits for a run or a version waits no longer, whatever its own deadline.
    version_wait_seconds: float = pydantic.Field(default=600.0, gt=0, le=86_400)
    # Decoding that samples nothing for so long fails the liveness check.
    stall_seconds: float = pydantic.Field(default=120.0, gt=0)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    embedded: EmbeddedConfig = EmbeddedConfig()
    server: ServerConfig = ServerConfig()

    @pydantic.field_validator("model")
    @classmethod
    def _is_model_folder(cls, folder: Path) -> Path:
        if not (folder / "config.json").is_file():
            raise ValueError(
                "no model folder is there (config.json is missing); give a local Hugging Face folder"
            )
        return folder
