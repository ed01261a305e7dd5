"""A way between two services that is cut and mended again: nobody is told, as where a network parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Way:
    """Passes bytes on to an address. Cut, it holds them back, and whoever calls anew gets no answer."""

    def __init__(self, there: str) -> None:
        self.there = there
        self.address = ""
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        self._open.clear()

    def mend(self, *, lost: bool) -> None:
        """What was held back comes now, as to one that was frozen; or is lost, its connections with it."""
        if lost:
            for writer in list(self._writers):
                writer.transport.abort()
        self._open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.there.rpartition(":")
        await self._open.wait()
        there, back = await asyncio.open_connection(host, int(port))
        self._writers |= {writer, back}
        for source, target in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pass(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self._open.wait()
                target.write(data)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            target.close()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def way_to(there: str) -> AsyncIterator[Way]:
    """A way that listens on a port of its own."""
    way = Way(there)
    server = await asyncio.start_server(way.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    way.address = f"{host}:{port}"
    try:
        yield way
    finally:
        server.close()
        way.mend(lost=True)
        await way.close()
