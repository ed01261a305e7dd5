"""From what is configured to where replicas are.

1. "host:port" is one replica. "dns:///name:port" is every address that the name has now: a Kubernetes
   headless service, which gains and loses addresses as it scales.
2. A name that cannot be looked up keeps the addresses it had: a DNS outage takes no replica away. Nor does it
   take more than one thread of those that whoever calls this has: a resolver that is away holds it for long.
3. A replica found through a name is still checked against that name's certificate.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, Final

from quartet.config import ConfigError
from quartet.kit.channel import ClientSecurity
from quartet.kit.own_log import get_logger
from quartet.kit.repeated import Repeated
from quartet.kit.security import check_client

DNS: Final = "dns:///"
# A resolver that answers later is away; the last answer stays good.
LOOKUP_SECONDS: Final = 5.0
# One client watches the health of every replica; larger fleets are split between clients.
MAX_REPLICAS: Final = 1024

log = get_logger()


class Addresses:
    """The configured addresses, and what they mean now."""

    def __init__(self, configured: Sequence[str], security: ClientSecurity) -> None:
        """Raises ConfigError for an address that cannot be used."""
        if not 1 <= len(configured) <= MAX_REPLICAS:
            raise ConfigError(f"{len(configured)} addresses of replicas; give 1 to {MAX_REPLICAS}")
        self._security = security
        self._plain = [one for one in configured if not one.startswith("dns:")]
        named = (_name_and_port(one) for one in configured if one.startswith("dns:"))
        self._names = list(dict.fromkeys(named))  # one that is listed twice is looked up once
        for address in configured:
            check_client(address, security)
        self._found: dict[tuple[str, int], list[str]] = {name: [] for name in self._names}
        #: Of names that were given up waiting for; their threads cannot be.
        self._asked: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._repeated = Repeated()

    @property
    def change(self) -> bool:
        """Whether looking them up again can ever give another answer."""
        return bool(self._names)

    async def now(self) -> dict[str, ClientSecurity]:
        """How to reach every replica there is, by "host:port"."""
        await asyncio.gather(*(self._look_up(name) for name in self._names))
        replicas = dict.fromkeys(self._plain, self._security)
        for name, found in self._found.items():
            replicas |= dict.fromkeys(found, self._named(name[0]))
        return dict(list(replicas.items())[:MAX_REPLICAS])

    async def _look_up(self, name: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        asked = self._asked.pop(name, None)
        if asked is None:
            asked = asyncio.ensure_future(loop.getaddrinfo(*name, type=socket.SOCK_STREAM))
            asked.add_done_callback(_heard)
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                answers = await asyncio.shield(asked)
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no answer within {LOOKUP_SECONDS:g} s"
            held_back = self._repeated.held_back((name, why))
            if held_back is not None:
                kept = len(self._found[name])
                log.warning("name not found", name=name[0], kept=kept, why=why, held_back=held_back)
            if not asked.done():
                self._asked[name] = asked
            return
        hosts = sorted({str(address[0]) for *_, address in answers})
        self._found[name] = [f"[{host}]:{name[1]}" if ":" in host else f"{host}:{name[1]}" for host in hosts]

    def _named(self, host: str) -> ClientSecurity:
        if not self._security.encrypted or self._security.server_name:
            return self._security
        return self._security.model_copy(update={"server_name": host})


def _heard(asked: asyncio.Future[Any]) -> None:
    """Why a name was not found is told where it is waited for, and where nobody does any more not at all."""
    if not asked.cancelled():
        asked.exception()


def _name_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix(DNS).removeprefix("dns:").rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ConfigError(f"address {address!r} is refused; write dns:///name:port")
    try:
        host.encode("idna")  # as it will be looked up
    except UnicodeError as error:
        raise ConfigError(f"address {address!r} is refused: {host!r} is no name ({error})") from None
    return host, int(port)
