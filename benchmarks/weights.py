"""Fetching a whole version: gRPC against raw TCP, HTTP, shared memory against memcpy, all in one run.

Random bf16 weights (nothing compresses), chunks of 1 MiB. Every road has a publisher and a reader of its own,
fresh processes with the allocator's settings that a service has, so that no road inherits another's heap. The
roads take turns, round after round, each round begun with another; the first two rounds warm all of them up
and do not count. Figures are medians over the rounds, ratios medians of the ratios within a round. CPU
seconds are those of both processes together, user and system.

1. gRPC: `fetch_version`, every chunk, tensor and the whole verified.
2. Raw TCP: the same chunks through one socket by `sendall` and `recv_into`, unverified.
3. HTTP: the same chunks from a bare ASGI application under uvicorn to an aiohttp client, both on uvloop,
   unverified.
4. Bare gRPC: one message of a chunk's size over and over through a bare grpc.aio server and client, dropped
   on arrival. What it costs, no road over gRPC in Python can do without.
5. Shared memory: `fetch_version` with the transport SharedMemory, verified, against numpy's copy of as many
   bytes in one process, into fresh memory and into memory that was touched before. The first reader makes the
   publisher write the file; the later ones only map it.

The roads over gRPC and HTTP run on uvloop, as the services do. Each reader of the first three holds what it
received last until it has the next, as a replica does, and all take their memory from
`quartet.weights.pages`: after the warm-up it is memory that was written before. Before a copy into fresh
memory as much free memory is brought to hand as it will fill (fresh_memory.py).

    python benchmarks/weights.py [--gib 1] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass

import aiohttp
import fresh_memory
import grpc
import numpy as np
import uvicorn
import uvloop
from figures import Figure, arguments, report
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

GIB = 1 << 30
#: Of one tensor; a model of 1 GiB has sixteen.
TENSOR_BYTES = 64 << 20
#: What is measured in every round.
NAMES = {
    "raw": "raw TCP",
    "grpc": "gRPC verified",
    "http": "HTTP unverified",
    "bare": "bare gRPC",
    "shared": "shared memory verified",
    "fresh": "memcpy into fresh memory",
    "touched": "memcpy into touched memory",
}
#: Who publishes for whom; the copies need nobody.
PUBLISHER_OF = {"raw": "raw", "grpc": "grpc", "http": "http", "bare": "bare", "shared": "grpc"}
#: Until a reader's memory was written before.
WARM_UP_ROUNDS = 2
TICKS = os.sysconf("SC_CLK_TCK")

Fetch = Callable[[], Awaitable[object]]


def model(size: int) -> dict[str, Tensor]:
    """Random weights of so many bytes."""
    rng = np.random.default_rng(0)
    count = max(1, size // TENSOR_BYTES)
    shape = (size // count // 2 // 1024, 1024)
    return {
        f"layers.{index}.weight": Tensor("BF16", shape, rng.integers(0, 1 << 16, shape, np.uint16).data)
        for index in range(count)
    }


# Publishers: each prints where it serves and how many bytes, and ends with its input.


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


# Readers: each does one transfer for every line of its input, and prints what it cost.


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


# The parent.


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


class Child:
    """A process that does one part of one road."""

    def __init__(self, stack: ExitStack, *part: object) -> None:
        command = [sys.executable, __file__, "--part", *map(str, part)]
        pipe = subprocess.PIPE
        self._process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))

    def told(self) -> list[object]:
        """The next line that is for us; logs are passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("["):
                return list(json.loads(line))
        raise RuntimeError(f"{self._process.args!r} ended")

    def go(self) -> list[object]:
        """Have it do its work once."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self.told()

    def cpu_s(self) -> float:
        """So far."""
        with open(f"/proc/{self._process.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


def measure(reader: Child, publisher: Child | None) -> Cost:
    """One transfer."""
    before_s = publisher.cpu_s() if publisher else 0.0
    wall_s, cpu_s = map(float, map(str, reader.go()))
    return Cost(wall_s, cpu_s + (publisher.cpu_s() - before_s if publisher else 0.0))


def compare(size: int, rounds: int) -> list[Figure]:
    """Start every process, and alternate between the roads."""
    costs: dict[str, list[Cost]] = {road: [] for road in NAMES}
    with ExitStack() as stack:
        publishers = {road: Child(stack, "publish", road, size) for road in set(PUBLISHER_OF.values())}
        places = {road: publisher.told() for road, publisher in publishers.items()}
        (total,) = {int(str(payload_bytes)) for _, payload_bytes in places.values()}
        readers = {
            road: Child(stack, "read", road, total, *places.get(PUBLISHER_OF.get(road, ""), [])[:1])
            for road in NAMES
        }
        roads = list(NAMES)
        for _ in range(WARM_UP_ROUNDS + rounds):
            for road in roads:
                costs[road].append(measure(readers[road], publishers.get(PUBLISHER_OF.get(road, ""))))
            roads = [*roads[1:], roads[0]]
    first = costs["shared"][0]
    return figures(total, first, {road: each[WARM_UP_ROUNDS:] for road, each in costs.items()})


def figures(size: int, first: Cost, costs: dict[str, list[Cost]]) -> list[Figure]:
    def rate(name: str) -> float:
        return size / 1e6 / statistics.median(cost.wall_s for cost in costs[name])

    def cpu(name: str) -> float:
        return statistics.median(cost.cpu_s for cost in costs[name]) * GIB / size

    def faster(name: str, rival: str) -> float:
        pairs = zip(costs[name], costs[rival], strict=True)
        return statistics.median(other.wall_s / own.wall_s for own, other in pairs)

    label = f"{size / GIB:.3g} GiB"
    return [
        *(Figure(f"{label}: {name}", rate(key), "MB/s") for key, name in NAMES.items()),
        *(
            Figure(f"{label}: {NAMES[key]}, both processes", cpu(key), "CPU s/GiB")
            for key in ("raw", "http", "bare", "shared")
        ),
        Figure(f"{label}: gRPC verified, both processes", cpu("grpc"), "CPU s/GiB", "<= 1.1"),
        Figure(f"{label}: bare gRPC / raw TCP", faster("bare", "raw"), "x"),
        Figure(f"{label}: bare gRPC / HTTP unverified", faster("bare", "http"), "x"),
        Figure(f"{label}: gRPC verified / raw TCP", faster("grpc", "raw"), "x", ">= 0.45"),
        Figure(f"{label}: gRPC verified / HTTP unverified", faster("grpc", "http"), "x", ">= 1"),
        Figure(f"{label}: shared memory verified / memcpy, fresh", faster("shared", "fresh"), "x", ">= 0.5"),
        Figure(
            f"{label}: shared memory verified / memcpy, touched", faster("shared", "touched"), "x", ">= 0.5"
        ),
        Figure(f"{label}: shared memory, first reader", size / 1e6 / first.wall_s, "MB/s"),
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tune_allocator()
    match options.part:
        case None:
            figures = compare(int(options.gib * GIB), options.rounds)
            report(figures, options.json, rounds=options.rounds)
        case [part, road, size, *place]:
            uvloop.run(
                publish(road, int(size)) if part == "publish" else read(road, "".join(place), int(size))
            )


if __name__ == "__main__":
    main()
