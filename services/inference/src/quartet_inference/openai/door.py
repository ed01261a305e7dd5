"""Who may come in to the front, and whether it could open now. Imports neither torch nor an HTTP library."""

from __future__ import annotations

import ssl

from quartet.config import ConfigError
from quartet.kit.security import ServerTls, TokenFile
from quartet.kit.server import check_free

from quartet_inference.openai.config import OpenAiConfig


def check_here(config: OpenAiConfig) -> None:
    """Whether the front would begin now; the port is let go at once. Raises ConfigError."""
    if not config.address:
        return
    api_key(config)
    if config.tls is not None:
        tls_context(config.tls)
    check_free(config.address, "openai.address")


def api_key(config: OpenAiConfig) -> TokenFile | None:
    """The key of callers, where there is one. Raises ConfigError."""
    return TokenFile(config.api_key_file, "openai.api_key_file") if config.api_key_file else None


def tls_context(tls: ServerTls) -> ssl.SSLContext:
    """TLS as the files are now. Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file)
        if tls.client_ca_file is not None:
            context.load_verify_locations(tls.client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise ConfigError(
            f"openai.tls cannot be loaded: {error.strerror or error}; name PEM files that this user can read"
        ) from None
    return context
