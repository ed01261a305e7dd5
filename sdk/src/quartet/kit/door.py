"""The door of an HTTP server beside gRPC: where it listens, who may come in, whether it could open now.

1. Off loopback it needs TLS, and a key or a client certificate from every caller, unless the configuration
   writes out that the network is private by other means.
2. A key, and what TLS is made of, are files, read again when they change (quartet.kit.security,
   quartet.kit.certificates).

Imports no HTTP library.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Self

import pydantic

from quartet.config import Config
from quartet.kit.certificates import Followed, authorities, load_pair, pem
from quartet.kit.security import ServerTls, TokenFile, host_port, is_loopback
from quartet.kit.server import check_free, check_port_file


class HttpDoor(Config):
    """The keys of a door."""

    # "host:port"; port 0 takes any free one. Without it nothing listens.
    address: str = ""
    # One line: the key that every caller sends. Re-read when the file changes.
    api_key_file: Path | None = None
    tls: ServerTls | None = None
    insecure_ok_off_loopback: bool = False
    # The address, once it is bound.
    port_file: Path | None = None

    @pydantic.field_validator("address")
    @classmethod
    def _is_address(cls, address: str) -> str:
        return host_port(address) if address else ""

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


def check_door(config: HttpDoor, prefix: str = "") -> None:
    """Whether it would open now; the port is let go at once. Its keys begin with `prefix`.

    Raises ConfigError.
    """
    if not config.address:
        return
    api_key(config, prefix)
    if config.tls is not None:
        tls_context(config.tls, prefix)
    check_free(config.address, f"{prefix}address")
    if config.port_file is not None:
        check_port_file(config.port_file, f"{prefix}port_file")


def api_key(config: HttpDoor, prefix: str = "") -> TokenFile | None:
    """The key of callers, where there is one. Raises ConfigError."""
    return TokenFile(config.api_key_file, f"{prefix}api_key_file") if config.api_key_file else None


def tls_context(tls: ServerTls, prefix: str = "") -> ssl.SSLContext:
    """TLS that follows its files, with each handshake. Raises ConfigError where they cannot be used now."""
    table = f"{prefix}tls."
    contexts = Followed(tls.files(table), lambda: _context(tls, table), tls.cert_file)
    listening = contexts.now

    def follow(connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _of: ssl.SSLContext) -> None:
        # OpenSSL asks which certificate a client is to be shown, also one that names no host. A whole context
        # rather than another pair in this one: an authority that is no longer named is trusted no longer.
        contexts.renewed()
        if contexts.now is not listening:
            connection.context = contexts.now

    listening.sni_callback = follow
    return listening


def _context(tls: ServerTls, table: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    for key, path in tls.files(table).items():
        pem(key, path)
    load_pair(context, table, tls.cert_file, tls.key_file)
    if tls.client_ca_file is not None:
        authorities(f"{table}client_ca_file", tls.client_ca_file)
        context.load_verify_locations(tls.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
        # A session that is taken up again shows no certificate: it would outlive its authority here.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context
