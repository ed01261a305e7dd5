"""Files of keys and certificates: whether they can be used, and following them when they are replaced.

1. What cannot be used is said in one sentence with its key and path: OpenSSL's words are of no file, and gRPC
   has none.
2. `Followed`: what is made of files is made anew when they change. Half way through a rotation, where a
   certificate and a key are not each other's, what was made last stays, and the log says so once.
3. A certificate of one's own that ends soon, or has, is told in the log, at the start and later (expiry.py).
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from quartet.config import ConfigError
from quartet.kit import expiry
from quartet.kit.own_log import get_logger

# What OpenSSL says of a certificate that is another key's.
_MISMATCHES = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"})

T = TypeVar("T")

log = get_logger()


class Followed(Generic[T]):
    """What is made of files. One thread at a time."""

    def __init__(self, files: Mapping[str, Path], make: Callable[[], T], own: Path | None = None) -> None:
        """Make it for the first time. Raises ConfigError.

        `files` are by the keys that name them; `own` is the certificate among them whose end is told.
        """
        self._files, self._make, self._own = files, make, own
        self._told = ""
        self.now = self._made(_stamps(files))

    def renewed(self) -> T | None:
        """Another one, where the files make another one by now; it is also in `now`."""
        try:
            stamps = _stamps(self._files)
            if stamps == self._of:
                if self._own is not None:
                    expiry.watched(self._own).look()
                return None
            self.now = self._made(stamps)
        except ConfigError as error:  # in the middle of a rotation, or it never ends
            if self._told != str(error):
                self._told = str(error)
                log.warning("certificate_stays", why=self._told)
            return None
        self._told = ""
        return self.now

    def _made(self, stamps: list[tuple[int, int]]) -> T:
        made = self._make()
        if self._own is not None:
            expiry.watched(self._own).read(pem("cert_file", self._own))
        self._of = stamps
        return made


def check_pair(table: str, cert_file: Path, key_file: Path) -> None:
    """Whether a certificate is that of a key, which gRPC says of neither. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # how strong they are is for whoever uses them to judge
    load_pair(context, table, cert_file, key_file)


def load_pair(context: ssl.SSLContext, table: str, cert_file: Path, key_file: Path) -> None:
    """What the context shows. Raises ConfigError where they are no pair, or too weak for it."""
    try:
        context.load_cert_chain(cert_file, key_file, password=lambda: "")  # and asks at no terminal for one
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        told = (
            "do not belong together" if reason in _MISMATCHES else f"are no pair that can be used ({reason})"
        )
        raise ConfigError(
            f"{table}cert_file = {str(cert_file)!r} and {table}key_file = {str(key_file)!r} {told}; "
            "name a certificate, with those that it needs behind it, and its own key, without a passphrase"
        ) from None


def authorities(key: str, path: Path) -> bytes:
    """Who is to have signed what others show. With none that can be read gRPC refuses every handshake, and
    does not say why. Raises ConfigError."""
    content = pem(key, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        why = f" ({getattr(error, 'reason', None) or error})"
    else:
        if context.cert_store_stats()["x509"]:
            return content
        why = ""
    raise ConfigError(
        f"{key} = {str(path)!r} holds no certificate that can be read{why}; name a PEM file of the "
        "certificates of those who sign, and nothing broken behind them"
    )


def pem(key: str, path: Path) -> bytes:
    """The file of a key. Raises ConfigError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(key, path, error) from None
    if b"-----BEGIN" not in content:
        raise ConfigError(f"{key} = {str(path)!r} is not PEM; convert it with openssl")
    return content


def _stamps(files: Mapping[str, Path]) -> list[tuple[int, int]]:
    stamps = []
    for key, path in files.items():
        try:
            stat = os.stat(path)
        except OSError as error:
            raise _unreadable(key, path, error) from None
        stamps.append((stat.st_mtime_ns, stat.st_ino))
    return stamps


def _unreadable(key: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{key} = {str(path)!r} cannot be read: {error.strerror}; name a PEM file that this user can read"
    )
