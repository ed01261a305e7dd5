"""Who may talk to whom: TLS, client certificates and bearer tokens.

1. A server off loopback needs TLS, and a client certificate or a token from every caller. A client off
   loopback needs TLS. The one way around it is written out in the configuration: `insecure_ok_off_loopback
   = true`, for networks that are private by other means (a compose network, a mesh).
2. Tokens and certificates are files, re-read when they change, so that rotating a secret needs no restart
   (certificates.py, rotating_channel.py). While a token's file is away, or holds none, the last one stays
   good, and the log says so.
3. A secret is never logged and never part of an error.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import grpc
import pydantic

from quartet.config import Config, ConfigError
from quartet.kit.certificates import Followed, authorities, check_pair, pem
from quartet.kit.own_log import get_logger

# A file that holds more is not a token.
MAX_TOKEN_BYTES = 4096
MAX_PORT = 65535
REVOKE = "the last token stays good; to revoke it put another one there"

log = get_logger()


class ServerTls(Config):
    """Certificates of a server. `client_ca_file` makes client certificates mandatory (mutual TLS)."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None

    def files(self, table: str) -> dict[str, Path]:
        """Those that are named, by their keys in a table."""
        return {f"{table}{name}": path for name, path in self if path is not None}


class ClientSecurity(Config):
    """How a client proves who it is and whom it trusts.

    The default is plaintext, which only loopback accepts.
    """

    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    token_file: Path | None = None
    server_name: str = ""
    insecure_ok_off_loopback: bool = False

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together: set both or neither")
        if not self.encrypted and (self.cert_file is not None or self.server_name):
            raise ValueError("cert_file, key_file and server_name need TLS: set ca_file, or tls = true")
        return self

    @property
    def encrypted(self) -> bool:
        """Whether the channel uses TLS: asked for, or implied by a CA."""
        return self.tls or self.ca_file is not None

    def certificate_files(self) -> dict[str, Path]:
        """Those that TLS is made of, by their keys: none where it trusts the system's authorities alone."""
        named = {"ca_file": self.ca_file, "cert_file": self.cert_file, "key_file": self.key_file}
        return {key: path for key, path in named.items() if path is not None}


class TokenFile:
    """A token in a file. Re-read whenever the file changes; safe from any thread."""

    def __init__(self, path: Path, key: str = "token_file") -> None:
        """Read the token once, so that a missing file fails at the start. Raises ConfigError with the key."""
        self._path = path
        self._key = key
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._token = self._said = ""
        self.read()

    def read(self) -> str:
        """The current token."""
        with self._lock:
            try:
                stat = os.stat(self._path)
                # Secrets are replaced by renaming, so the inode counts as well as time and size.
                stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
                if stamp != self._stamp:
                    before = self._token
                    self._token, self._stamp = self._load(), stamp
                    if self._token != before:
                        self._said = ""
            except OSError as error:
                if self._stamp is None:
                    raise ConfigError(
                        f"{self._key} = {str(self._path)!r} cannot be read: {error.strerror}; "
                        "name a file that holds the token"
                    ) from None
                # In the middle of a rotation the file may be away: the last token stays good.
                self._stays(error.strerror or str(error))
            return self._token

    def _stays(self, why: str) -> None:
        """Whoever meant to revoke it by that is told, once until there is another one."""
        if self._said != why:
            self._said = why
            log.warning("token_stays", key=self._key, path=str(self._path), why=why, remedy=REVOKE)

    def accepts(self, offered: str) -> bool:
        """Whether a caller's token is the right one, in constant time."""
        # HTTP servers hand on bytes that are no text as half surrogate pairs.
        return hmac.compare_digest(offered.encode("utf-8", "surrogatepass"), self.read().encode())

    def _load(self) -> str:
        raw = self._path.read_bytes()
        try:
            token = raw.decode("ascii").strip()
        except UnicodeDecodeError:
            token = ""
        if not token or len(raw) > MAX_TOKEN_BYTES or not token.isprintable():
            if self._stamp is not None:
                self._stays("it holds no token")
                return self._token  # A half-written rotation does not lock everybody out.
            raise ConfigError(
                f"{self._key} = {str(self._path)!r} holds no token; it should be one line of printable ASCII"
            )
        return token


def is_loopback(address: str) -> bool:
    """Whether an address ("host:port", "[v6]:port", "unix:...", "dns:///...") stays on this machine."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = _host(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_name(address: str) -> bool:
    """Whether it is to be looked up where it is; "localhost" is known everywhere."""
    try:
        ipaddress.ip_address(_host(address))
    except ValueError:
        return not is_loopback(address)
    return False


def _host(address: str) -> str:
    target = address.rpartition("/")[2] if address.startswith("dns:") else address
    target = target.removeprefix("dns:").removeprefix("ipv4:").removeprefix("ipv6:")
    return target.rpartition(":")[0].strip("[]")


def check_server(address: str, tls: ServerTls | None, token: TokenFile | None, *, insecure_ok: bool) -> None:
    """Refuse to bind where strangers could reach an open door. Raises ConfigError."""
    if insecure_ok or is_loopback(address):
        return
    if tls is None:
        raise ConfigError(
            f"server.address = {address!r} is off loopback and plaintext; set server.tls.cert_file and "
            "server.tls.key_file, or server.insecure_ok_off_loopback = true on a private network"
        )
    if token is None and tls.client_ca_file is None:
        raise ConfigError(
            f"server.address = {address!r} is off loopback and lets everybody in; set "
            "server.tls.client_ca_file or server.token_file, or "
            "server.insecure_ok_off_loopback = true on a private network"
        )


def host_port(address: str) -> str:
    """The address, if it is one. Errors: ValueError, for a validator."""
    if _without_brackets(address):
        raise ValueError("an IPv6 address is written in brackets before its port, such as [::1]:50051")
    if "://" in address and not address.startswith("dns:"):  # a name of gRPC's
        raise ValueError("is a URL, and should be host:port, such as 127.0.0.1:0, without a scheme")
    if not re.fullmatch(r".+:\d{1,5}", address):
        raise ValueError("should be host:port, such as 127.0.0.1:0")
    return address


def check_clients(key: str, addresses: Sequence[str], security: ClientSecurity) -> None:
    """`check_client` of a key's addresses. Errors: ValueError, for a validator."""
    for address in addresses:
        try:
            check_client(address, security)
        except ConfigError as error:
            raise ValueError(f"{key}: {error}") from None


def check_client(address: str, security: ClientSecurity) -> None:
    """Refuse to send prompts, weights and tokens in plaintext off this machine. Raises ConfigError."""
    if _without_brackets(address):  # gRPC takes all of it for a host, and 443 for its port
        raise ConfigError(f"address {address!r} is IPv6 without brackets; write it as [::1]:50051")
    port = address.rpartition(":")[2]
    if port.isdecimal() and int(port) > MAX_PORT:  # gRPC takes it for another one
        raise ConfigError(f"address {address!r} is no address: ports end at {MAX_PORT}")
    if "://" in address and not address.startswith(("dns:", "unix:")):  # names of gRPC's
        raise ConfigError(f"address {address!r} is a URL; write host:port")
    if security.encrypted or is_loopback(address):
        return
    if not port.isdecimal():  # gRPC takes 443, where nobody listens in plaintext
        raise ConfigError(f"address {address!r} has no port; write host:port")
    if security.insecure_ok_off_loopback:
        return
    remedy = "set ca_file (or tls = true), or insecure_ok_off_loopback = true on a private network"
    sentence = f"address {address!r} is off loopback and the channel is plaintext; {remedy}"
    raise ConfigError(sentence, remedy=remedy)


def _without_brackets(address: str) -> bool:
    """Whether it is IPv6 as it stands, or before its last colon."""
    for text in (address, address.rpartition(":")[0]):
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            continue
        return True
    return False


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """TLS credentials that follow their files. Raises ConfigError where they cannot be used at the start."""
    table = "server.tls."
    certificates = Followed(tls.files(table), lambda: _certificates(tls, table), tls.cert_file)
    # `renewed` is called by gRPC on every handshake, one at a time; None keeps the certificates in use.
    return grpc.dynamic_ssl_server_credentials(
        certificates.now,
        certificates.renewed,
        require_client_authentication=tls.client_ca_file is not None,
    )


def client_credentials(security: ClientSecurity) -> grpc.ChannelCredentials:
    """TLS credentials of a channel, by the files as they are. Raises ConfigError where one cannot be read, or
    is not what it should be."""
    root = authorities("ca_file", security.ca_file) if security.ca_file else None
    key = pem("key_file", security.key_file) if security.key_file else None
    chain = pem("cert_file", security.cert_file) if security.cert_file else None
    if security.cert_file is not None and security.key_file is not None:
        check_pair("", security.cert_file, security.key_file)
    return grpc.ssl_channel_credentials(root_certificates=root, private_key=key, certificate_chain=chain)


def _certificates(tls: ServerTls, table: str) -> grpc.ServerCertificateConfiguration:
    pair = (pem(f"{table}key_file", tls.key_file), pem(f"{table}cert_file", tls.cert_file))
    check_pair(table, tls.cert_file, tls.key_file)
    trusted = authorities(f"{table}client_ca_file", tls.client_ca_file) if tls.client_ca_file else None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=trusted)
