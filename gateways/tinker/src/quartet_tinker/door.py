"""Who may come in, and whether the gateway could open now. Imports no HTTP library."""

from __future__ import annotations

from quartet.config import ConfigError
from quartet.kit import door, tracing
from quartet.kit.door import check_door
from quartet.kit.security import TokenFile

from quartet_tinker.config import GatewayConfig

#: The SDK refuses to send any other key.
KEY_PREFIX = "tml-"


def check_here(config: GatewayConfig) -> None:
    """Whether the gateway would begin now; the port is let go at once. Raises ConfigError."""
    check_door(config)
    api_key(config)
    tracing.check()


def api_key(config: GatewayConfig) -> TokenFile | None:
    """The key of callers, where there is one. Raises ConfigError."""
    key = door.api_key(config)
    if key is not None and not key.read().startswith(KEY_PREFIX):
        raise ConfigError(
            f"api_key_file = {str(config.api_key_file)!r} is refused: the SDK sends only keys that begin "
            f"with {KEY_PREFIX!r}; write such a one into it"
        )
    return key
