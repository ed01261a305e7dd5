"""A TCP proxy on loopback that counts the bytes of each direction. What it counts is everything: HTTP/2
framing, headers, heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

READ_BYTES = 1 << 16


@dataclass
class CountingProxy:
    """Listens on a port of its own and forwards to `target` ("host:port")."""

    target: str
    to_target_bytes: int = 0
    from_target_bytes: int = 0
    address: str = ""
    _server: asyncio.Server | None = field(default=None, repr=False)

    async def start(self) -> CountingProxy:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    @property
    def total_bytes(self) -> int:
        return self.to_target_bytes + self.from_target_bytes

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.target.rsplit(":", 1)
        target_reader, target_writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(asyncio.CancelledError):  # the benchmark has ended
            await asyncio.gather(
                self._pump(reader, target_writer, "to_target_bytes"),
                self._pump(target_reader, writer, "from_target_bytes"),
                return_exceptions=True,
            )

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counter: str) -> None:
        while data := await reader.read(READ_BYTES):
            setattr(self, counter, getattr(self, counter) + len(data))
            writer.write(data)
            await writer.drain()
        writer.close()
