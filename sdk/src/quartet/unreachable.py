"""What gRPC says of a connection that was not made, with what that means: its words are OpenSSL's, or none.

1. TLS on one side alone, a certificate of an unknown authority, and one of another name, are said to be that,
   with the keys of a client's security (quartet.kit.security) that decide. Where the peer closed the
   connection without a word, what it may have wanted is said. Whoever has other names for these keys says
   them instead (`with_remedies`).
2. Anything else is left as it is. Of a name with several addresses gRPC tells the error of one: where a
   connection is refused at that, `listens` says whether there is somebody at another. A call that ran out of
   time on a connection is none of these: `was_not_made`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

#: A connection is made, or refused, well within that; a machine that is away answers nothing.
LOOK_SECONDS: Final = 2.0

#: Of a name, and of connections alone: one that stood may end with the words below, too.
_NO_ADDRESS: Final = "errors resolving "
_NOT_MADE: Final = ("failed to connect to all addresses", _NO_ADDRESS)

PLAINTEXT_THERE: Final = "it speaks plaintext, and was called with TLS"
UNKNOWN_AUTHORITY: Final = "its certificate is of no authority that is trusted here"
ANOTHER_NAME: Final = "its certificate is for another name"
EXPIRED: Final = "its certificate has expired"
CLOSED: Final = (
    "it took the connection and closed it, as one with TLS does to a caller without, or without a "
    "certificate that it trusts"
)

_MEANINGS: Final = {
    "WRONG_VERSION_NUMBER": PLAINTEXT_THERE,
    "certificate has expired": EXPIRED,
    "CERTIFICATE_VERIFY_FAILED": UNKNOWN_AUTHORITY,
    "Hostname Verification Check failed": ANOTHER_NAME,
    "Socket closed": CLOSED,
}


#: By keys of a ClientSecurity, wherever its service has that.
_REMEDIES: Final = {
    PLAINTEXT_THERE: "leave tls and ca_file out",
    UNKNOWN_AUTHORITY: "ca_file is to name the one that signed it",
    EXPIRED: "it needs a new one there",
    ANOTHER_NAME: "call it by a name that it has, or give one as server_name",
    CLOSED: (
        "TLS wants ca_file (or tls = true), a certificate cert_file and key_file, one that is of its "
        "client_ca_file and has not expired"
    ),
}


def was_not_made(details: str) -> bool:
    """Whether that is said of a connection, and not of a call on one."""
    return any(said in details for said in _NOT_MADE)


def has_no_address(details: str) -> bool:
    """Whether that is said of a name, which gRPC found no address for: nobody was called."""
    return _NO_ADDRESS in details


def explained(details: str) -> str:
    """The same, and what it means."""
    if not was_not_made(details):
        return details
    meaning = next((meaning for said, meaning in _MEANINGS.items() if said in details), None)
    if meaning is None:
        return details
    certain = "" if meaning == CLOSED else "TLS: "
    return f"{certain}{meaning}; {_REMEDIES[meaning]} ({details})"


def with_remedies(explained: str, remedies: Mapping[str, str]) -> str:
    """The same with these remedies, by meaning, in the place of those that name keys."""
    for meaning, remedy in remedies.items():
        explained = explained.replace(f"{meaning}; {_REMEDIES[meaning]}", f"{meaning}; {remedy}")
    return explained


def is_of_tls(explained: str) -> bool:
    """Whether that says that TLS, or the lack of it, is why."""
    return any(meaning in explained for meaning in _REMEDIES)


async def listens(address: str) -> bool:
    """Whether somebody takes connections at "host:port"."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return True
