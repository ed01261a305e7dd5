"""Ports of the local services: chosen by the system before anything starts, so that every config can be
checked whole.

1. A port given by the user is refused with AddressRefused while another process listens on it.
2. A port chosen here is free at that moment and differs from the others chosen in the same call: all are
   held open until all are chosen.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack

LAST_PORT = 65535


class AddressRefused(ValueError):
    """An address that the user asked for cannot be listened on."""


def resolve(addresses: Sequence[str]) -> list[str]:
    """Each `host:port` with port 0 replaced by a free port."""
    chosen: list[str] = []
    with ExitStack() as stack:
        for address in addresses:
            host, _, port = address.rpartition(":")
            host = host.strip("[]") or "127.0.0.1"
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            # Connections of an ended service linger in TIME_WAIT; a restart on the same port must not trip
            # over them.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if not port.isdecimal() or int(port) > LAST_PORT:
                raise AddressRefused(f"{address!r} is no host:port with a port from 0 to {LAST_PORT}")
            try:
                listener.bind((host, int(port)))
                listener.listen(1)
            except OSError as error:
                raise AddressRefused(
                    f"cannot listen on {address}: {error.strerror}; choose another port, or 0 for a free one"
                ) from error
            bound = listener.getsockname()[1]
            chosen.append(f"[{host}]:{bound}" if family == socket.AF_INET6 else f"{host}:{bound}")
    return chosen
