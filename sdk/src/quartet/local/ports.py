"""Ports of the local services: chosen before anything starts, so that every config can be checked whole.

1. A port given by the user is refused with AddressRefused while another process listens on it.
2. A port chosen here is free at that moment and differs from the others chosen in the same call: all are
   held open until all are chosen.
3. It is none that the system gives to others by itself, and no other launcher of this machine chooses it as
   long as this process lives (Linux), so it is still free when its service binds it, which may be a minute
   later, and whenever that is started again.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import random
import socket
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Final

from quartet.config import ConfigError

LAST_PORT: Final = 65535
# Below what Linux, macOS and Windows give to outgoing connections and to whoever binds port 0 (32768 and up),
# and below the node ports of Kubernetes (30000 and up).
OWN_PORTS: Final = range(20_000, 30_000)
MAX_TRIES: Final = 64
#: Of a process: a launch of sixty replicas, whose ports are chosen once to be checked and once to be used.
MAX_MARKS: Final = 128
#: What keeps other launchers from ports that were chosen here. The kernel ends them with this process.
_marks: deque[socket.socket] = deque()


class AddressRefused(ValueError):
    """An address that the user asked for cannot be listened on. `at`: which of those that were given; `why`
    without what to do."""

    def __init__(self, why: str, at: int, remedy: str = "") -> None:
        super().__init__(f"{why}; {remedy}" if remedy else why)
        self.at = at
        self.why = why


def resolve(addresses: Sequence[object]) -> list[str]:
    """Each `host:port` with port 0 replaced by a free port."""
    chosen: list[str] = []
    with ExitStack() as stack:
        for at, address in enumerate(addresses):
            host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
            host = host.strip("[]") or "127.0.0.1"
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            if not colon or not port.isdecimal() or int(port) > LAST_PORT:
                raise AddressRefused(f"{address!r} is no host:port with a port from 0 to {LAST_PORT}", at)
            try:
                if int(port):
                    listener = _listening(family, host, int(port))
                else:
                    listener = _listening_anywhere(family, host)
                stack.enter_context(listener)
            except (OSError, TypeError) as error:  # the latter of a host that can be no name
                remedy = "choose another port, or 0 for a free one"
                why = error.strerror if isinstance(error, OSError) else "there can be no such host"
                raise AddressRefused(f"cannot listen on {address}: {why}", at, remedy) from error
            bound = listener.getsockname()[1]
            chosen.append(f"[{host}]:{bound}" if family == socket.AF_INET6 else f"{host}:{bound}")
    return chosen


def is_only_here(host: str) -> bool:
    """Whether the name, as this machine knows it, is of loopback alone."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def is_of_this_machine(host: str) -> bool:
    """Whether the name is of an address that this machine has, and others may reach."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, address in found:
        if is_only_here(str(address[0])):
            continue
        with socket.socket(family, kind) as listener, suppress(OSError):
            listener.bind(address)
            return True
    return False


def check_known(names: Sequence[str]) -> None:
    """Whether this machine knows all of them. Raises ConfigError."""
    for name in names:
        try:
            socket.getaddrinfo(name, None)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"--hosts: this machine does not know {name} ({error}); give names or addresses by which the "
                "machines reach each other"
            ) from None


def check_reached(names: Sequence[str], machine: int) -> None:
    """Whether others can reach this machine, which is one of these, by its name. Raises ConfigError."""
    if is_only_here(names[machine]) and not all(map(is_only_here, names)):
        raise ConfigError(
            f"--hosts: {names[machine]} is an address of loopback on that machine itself (so /etc/hosts may "
            "say), where no other reaches it; give its address in the network instead"
        )


def _listening_anywhere(family: socket.AddressFamily, host: str) -> socket.socket:
    """A listener on a port that is free, and marked as chosen. Errors: OSError, TypeError."""
    for port in random.sample(OWN_PORTS, MAX_TRIES):
        try:
            listener = _listening(family, host, port)
        except OSError as error:
            refused = error
            continue
        if _marked(port):
            return listener
        listener.close()
        refused = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    raise refused


def _listening(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    """A listener on the port. Errors: OSError, TypeError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an ended service linger in TIME_WAIT; a restart on the same port must not trip over
        # them.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    return listener


def _marked(port: int) -> bool:
    """Whether it was nobody's, and is this process's from here on. A name without a file is of a network's
    namespace, as ports are."""
    if sys.platform != "linux":
        return True
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0quartet-port-{port}")
    except OSError as error:
        mark.close()
        return error.errno != errno.EADDRINUSE  # else there are no such names here
    _marks.append(mark)
    if len(_marks) > MAX_MARKS:
        _marks.popleft().close()
    return True
