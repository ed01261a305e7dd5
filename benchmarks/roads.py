"""The roads that weights.py measures: of each a publisher and a reader, every one a process of its own.

1. `roads.py publish ROAD BYTES` prints [PLACE, BYTES] once it serves, and ends with its input.
2. `roads.py read ROAD BYTES PLACE` does one transfer for every line of its input, and prints [WALL_S, CPU_S]
   of it. A copy's place is empty.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import fresh_memory
import grpc
import numpy as np
import uvicorn
import uvloop
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.memory import tune_allocator
from quartet.kit.server import ServerConfig, Service, start
from quartet.weights import pages
from quartet.weights.fetch import fetch_version
from quartet.weights.payload import CHUNK_BYTES, Payload, chunk_spans
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.shared import SharedMemory
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor

#: Of one tensor; a model of 1 GiB has sixteen.
TENSOR_BYTES = 64 << 20
#: Who publishes for whom; the copies need nobody.
PUBLISHER_OF = {"raw": "raw", "grpc": "grpc", "http": "http", "bare": "bare", "shared": "grpc"}

Fetch = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Cost:
    """What one transfer took, or a moment to count from."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Cost:
        """By this process's own clocks."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.perf_counter(), own.ru_utime + own.ru_stime)

    def until_now(self) -> tuple[float, float]:
        """Wall and CPU seconds since."""
        now = self.now()
        return now.wall_s - self.wall_s, now.cpu_s - self.cpu_s


def model(size: int) -> dict[str, Tensor]:
    """Random weights of so many bytes."""
    rng = np.random.default_rng(0)
    count = max(1, size // TENSOR_BYTES)
    shape = (size // count // 2 // 1024, 1024)
    return {
        f"layers.{index}.weight": Tensor("BF16", shape, rng.integers(0, 1 << 16, shape, np.uint16).data)
        for index in range(count)
    }


# Publishers.


async def publish(road: str, size: int) -> None:
    store = WeightStore(keep=1)
    store.publish("r", 1, model(size))
    payload = store.get("r", 1).payload
    serve = {"raw": raw_publisher, "grpc": grpc_publisher, "http": http_publisher, "bare": bare_publisher}
    place, end = await serve[road](payload, store)
    print(json.dumps([place, payload.size]), flush=True)
    # An end that lets the process clean up its shared memory.
    await asyncio.to_thread(sys.stdin.read)
    await end()


async def grpc_publisher(payload: Payload, store: WeightStore) -> tuple[str, Fetch]:
    served = Service(SERVICE, add_weight_service, WeightServicer(store))
    server = await start([served], ServerConfig(), Health())
    return server.address, lambda: server.stop(0)


async def bare_publisher(payload: Payload, store: WeightStore) -> tuple[str, Fetch]:
    message = bytes(CHUNK_BYTES)

    async def repeat(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        for _ in chunk_spans(payload.size, 0):
            yield message

    handlers = {"Repeat": grpc.unary_stream_rpc_method_handler(repeat)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return f"127.0.0.1:{port}", lambda: server.stop(0)


async def http_publisher(payload: Payload, store: WeightStore) -> tuple[str, Fetch]:
    async def application(
        scope: dict[str, object], receive: object, send: Callable[..., Awaitable[None]]
    ) -> None:
        length = str(payload.size).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        for begin, end in chunk_spans(payload.size, 0):
            body = b"".join(payload.slices(begin, end))
            await send({"type": "http.response.body", "body": body, "more_body": end < payload.size})

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, log_level="error", lifespan="off", http="httptools")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))

    async def end() -> None:
        server.should_exit = True
        await serving

    return f"http://127.0.0.1:{listener.getsockname()[1]}/", end


async def raw_publisher(payload: Payload, store: WeightStore) -> tuple[str, Fetch]:
    """Send the payload to everybody who connects."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                for begin, end in chunk_spans(payload.size, 0):
                    for view in payload.slices(begin, end):
                        connection.sendall(view)

    serving = asyncio.create_task(asyncio.to_thread(serve))

    async def end() -> None:
        listener.shutdown(socket.SHUT_RDWR)
        await serving

    return str(listener.getsockname()[1]), end


# Readers.


async def read(road: str, place: str, size: int) -> None:
    if road in ("fresh", "touched"):
        return await asyncio.to_thread(copies, size, touched=road == "touched")
    # A channel that is never used connects nowhere.
    unused = "127.0.0.1:1"
    async with (
        connect(place if PUBLISHER_OF[road] == "grpc" else unused, bulk=True) as channel,
        grpc.aio.insecure_channel(place if road == "bare" else unused) as bare,
    ):
        fetch: Fetch = {
            "raw": lambda: asyncio.to_thread(raw_fetch, int(place), size),
            "grpc": lambda: fetch_version(channel, "r", 1),
            "http": lambda: http_fetch(place, size),
            "bare": lambda: bare_fetch(bare),
            "shared": lambda: fetch_version(channel, "r", 1, transports=[SharedMemory()]),
        }[road]
        held: list[object] = []
        while await asyncio.to_thread(sys.stdin.readline):
            began = Cost.now()
            received = await fetch()
            print(json.dumps(began.until_now()), flush=True)
            held[:] = [received]


def copies(size: int, *, touched: bool) -> None:
    """memcpy of so many bytes, into fresh or into touched memory."""
    source, target = np.ones(size, np.uint8), np.ones(size if touched else 0, np.uint8)
    while sys.stdin.readline():
        if not touched:
            fresh_memory.bring(size)
        began = Cost.now()
        kept = target if touched else np.empty(size, np.uint8)
        np.copyto(kept, source)
        print(json.dumps(began.until_now()), flush=True)
        del kept


def raw_fetch(port: int, size: int) -> object:
    buffer = pages.take(size)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for begin, end in chunk_spans(size, 0):
            while begin < end:
                begin += connection.recv_into(buffer[begin:end])
    return buffer


async def bare_fetch(channel: grpc.aio.Channel) -> None:
    call = channel.unary_stream("/bare/Repeat")(b"")
    while await call.read() is not grpc.aio.EOF:
        pass


async def http_fetch(url: str, size: int) -> object:
    buffer = pages.take(size)
    at = 0
    async with (
        aiohttp.ClientSession(read_bufsize=4 * CHUNK_BYTES) as session,
        session.get(url) as response,
    ):
        async for data in response.content.iter_any():
            buffer[at : at + len(data)] = data
            at += len(data)
    assert at == size
    return buffer


def main() -> None:
    tune_allocator()
    match sys.argv[1:]:
        case ["publish", road, size]:
            uvloop.run(publish(road, int(size)))
        case ["read", road, size, place]:
            uvloop.run(read(road, place, int(size)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
