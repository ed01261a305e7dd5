"""When a certificate ends, and who is told.

1. Read from the file itself: gRPC and `ssl` say of a certificate of one's own neither that it has expired nor
   when it will; a peer closes the connection, mostly without a word.
2. The log says it once when the end is near, and once when it is past. Of a certificate that many channels
   of a process show it is told once, not once by each.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Final

from quartet.kit.own_log import get_logger

#: Near: so long before the end, or in the last tenth of a shorter life, by when what renews it has done so.
NEAR_SECONDS: Final = 14 * 86_400.0
NEAR_SHARE: Final = 0.1
#: Certificates of one process: its servers', and one for each table of a client's security.
MAX_FILES: Final = 64

log = get_logger()


@dataclass(frozen=True)
class Validity:
    """From when to when, in seconds since 1970."""

    begin_s: float
    end_s: float

    @property
    def near_s(self) -> float:
        """From when on its end is near."""
        return self.end_s - min(NEAR_SECONDS, NEAR_SHARE * (self.end_s - self.begin_s))

    @property
    def has_expired(self) -> bool:
        """Whether no one takes it any more."""
        return time.time() >= self.end_s

    @property
    def end(self) -> str:
        """When it ends, to read."""
        return datetime.fromtimestamp(self.end_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class Watched:
    """The certificate of a file, as it was last read; its end is told in the log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.validity: Validity | None = None
        self._told = ""

    def read(self, pem: bytes) -> None:
        """What the file holds now; another one is told anew."""
        validity = validity_of(pem)
        if validity != self.validity:
            self.validity, self._told = validity, ""
        self.look()

    def look(self) -> None:
        """Tell what is so by now, if it was not told yet."""
        validity = self.validity
        if validity is None or time.time() < validity.near_s:
            return
        told = "certificate_expired" if validity.has_expired else "certificate_expires_soon"
        if told != self._told:
            self._told = told
            log.warning(
                told, cert_file=str(self._path), ends=validity.end, remedy="put a new pair in its place"
            )


@lru_cache(maxsize=MAX_FILES)
def watched(path: Path) -> Watched:
    """The one of a file in this process."""
    return Watched(path)


def validity_of(pem: bytes) -> Validity | None:
    """That of the certificate in a PEM file that ends first, of it and those behind it; None without any that
    can be read."""
    from cryptography import x509  # only here: without TLS nothing of it is imported

    try:
        first = min(x509.load_pem_x509_certificates(pem), key=lambda one: one.not_valid_after_utc)
    except ValueError:
        return None
    return Validity(first.not_valid_before_utc.timestamp(), first.not_valid_after_utc.timestamp())
