"""A way between two services that is cut and mended again: nobody is told, as where a network parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Flag, auto


class Cut(Flag):
    """What does not arrive: of the two directions one, or both."""

    REQUESTS = auto()
    ANSWERS = auto()
    BOTH = REQUESTS | ANSWERS


class Way:
    """Passes bytes on to an address. Cut, it holds them back, and whoever calls anew gets no answer."""

    def __init__(self, there: str) -> None:
        #: Looked at whenever somebody calls; where nobody listens there the connection breaks.
        self.there = there
        self.address = ""
        self._open = {direction: asyncio.Event() for direction in (Cut.REQUESTS, Cut.ANSWERS)}
        for passes in self._open.values():
            passes.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self, what: Cut = Cut.BOTH) -> None:
        for direction, passes in self._open.items():
            if direction in what:
                passes.clear()

    def mend(self, *, lost: bool) -> None:
        """What was held back comes now, as to one that was frozen; or is lost, its connections with it."""
        if lost:
            for writer in list(self._writers):
                writer.transport.abort()
        for passes in self._open.values():
            passes.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for passes in self._open.values():  # as of a first packet, which is sent again and again
            await passes.wait()
        host, _, port = self.there.rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        for source, target, direction in ((reader, back, Cut.REQUESTS), (there, writer, Cut.ANSWERS)):
            task = asyncio.create_task(self._pass(source, target, self._open[direction]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _pass(
        source: asyncio.StreamReader, target: asyncio.StreamWriter, passes: asyncio.Event
    ) -> None:
        try:
            while data := await source.read(1 << 16):
                await passes.wait()
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
