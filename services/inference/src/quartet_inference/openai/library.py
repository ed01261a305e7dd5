"""Whether the front's HTTP library is there; said without importing it, before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from quartet.config import ConfigError

from quartet_inference.openai.config import OpenAiConfig

LIBRARY: Final = "aiohttp"


def check_library(config: OpenAiConfig) -> None:
    """Refuse a front that cannot be. Errors: ConfigError."""
    if config.address and find_spec(LIBRARY) is None:
        raise ConfigError(
            f"openai.address = {config.address!r} needs {LIBRARY}, which is not installed; in the "
            "repository: pip install ./sdk './services/inference[openai]', or leave the address empty"
        )
