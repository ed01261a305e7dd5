"""Fetching a whole version: gRPC against raw TCP, HTTP, shared memory against memcpy, all in one run.

Two processes, this one the reader and a child the publisher; random bf16 weights (nothing compresses),
chunks of 1 MiB. Rounds alternate between the roads; figures are medians over the rounds, ratios medians of
the ratios within a round. CPU seconds are those of both processes together, user and system.

1. gRPC: `fetch_version`, every chunk, tensor and the whole verified, into fresh memory.
2. Raw TCP: the same chunks through one socket by `sendall` and `recv_into`, into fresh memory, unverified.
3. HTTP: the same chunks from a bare ASGI application under uvicorn (uvloop, httptools) to an aiohttp client,
   copied into fresh memory, unverified.
4. Shared memory: `fetch_version` with the transport SharedMemory, verified, against numpy's copy of as many
   bytes in one process, into fresh memory and into memory that was touched before. The first reader makes the
   publisher write the file; the later ones only map it.

    python benchmarks/weights.py [--gib 1] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import numpy as np
import uvicorn
from figures import Figure, arguments, report
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.memory import tune_allocator
from quartet.kit.server import ServerConfig, Service, start
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
    "shared": "shared memory verified",
    "fresh": "memcpy into fresh memory",
    "touched": "memcpy into touched memory",
}
TICKS = os.sysconf("SC_CLK_TCK")


def model(size: int) -> dict[str, Tensor]:
    """Random weights of so many bytes."""
    rng = np.random.default_rng(0)
    count = max(1, size // TENSOR_BYTES)
    shape = (size // count // 2 // 1024, 1024)
    return {
        f"layers.{index}.weight": Tensor("BF16", shape, rng.integers(0, 1 << 16, shape, np.uint16).data)
        for index in range(count)
    }


# The publisher.


async def publisher(size: int) -> None:
    """Serve one version in the three ways until its input ends; the first line printed says where."""
    store = WeightStore(keep=1)
    store.publish("r", 1, model(size))
    payload = store.get("r", 1).payload
    server = await start(
        [Service(SERVICE, add_weight_service, WeightServicer(store))], ServerConfig(), Health()
    )
    raw = await asyncio.to_thread(raw_publisher, payload)

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
    web = asyncio.create_task(uvicorn.Server(config).serve(sockets=[listener]))
    places = {"grpc": server.address, "raw": raw, "http": listener.getsockname()[1], "bytes": payload.size}
    print(json.dumps(places), flush=True)
    # An end that lets the process clean up its shared memory.
    await asyncio.to_thread(sys.stdin.read)
    web.cancel()
    await server.stop(0)


def raw_publisher(payload: Payload) -> int:
    """Send the payload to everybody who connects; the port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                for begin, end in chunk_spans(payload.size, 0):
                    for view in payload.slices(begin, end):
                        connection.sendall(view)

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


# The reader.


def raw_fetch(port: int, size: int) -> None:
    buffer = memoryview(np.empty(size, np.uint8).data)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for begin, end in chunk_spans(size, 0):
            while begin < end:
                begin += connection.recv_into(buffer[begin:end])


async def http_fetch(port: int, size: int) -> None:
    buffer = memoryview(np.empty(size, np.uint8).data)
    at = 0
    async with (
        aiohttp.ClientSession(read_bufsize=4 * CHUNK_BYTES) as session,
        session.get(f"http://127.0.0.1:{port}/") as response,
    ):
        async for data in response.content.iter_any():
            buffer[at : at + len(data)] = data
            at += len(data)
    assert at == size


@dataclass(frozen=True)
class Cost:
    """What one transfer took."""

    wall_s: float
    cpu_s: float


class Meter:
    """Wall time, and the CPU time of this process and the publisher."""

    def __init__(self, publisher_pid: int) -> None:
        self._stat = f"/proc/{publisher_pid}/stat"

    def _cpu_s(self) -> float:
        own = resource.getrusage(resource.RUSAGE_SELF)
        with open(self._stat) as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return own.ru_utime + own.ru_stime + (int(fields[11]) + int(fields[12])) / TICKS

    async def measure(self, work: Callable[[], Awaitable[object]]) -> Cost:
        """Do the work once."""
        cpu_s, began = self._cpu_s(), time.perf_counter()
        kept = await work()
        wall_s = time.perf_counter() - began
        del kept
        return Cost(wall_s, self._cpu_s() - cpu_s)


def copies(size: int) -> dict[str, Cost]:
    """memcpy of so many bytes, into fresh and into touched memory."""
    source = np.ones(size, np.uint8)
    target = np.empty(size, np.uint8)
    costs = {}
    for name in ("fresh", "touched"):
        began = time.perf_counter()
        np.copyto(target, source)
        costs[name] = Cost(time.perf_counter() - began, 0.0)
    return costs


async def compare(size: int, rounds: int) -> list[Figure]:
    """Start the publisher, and alternate between the roads."""
    command = [sys.executable, __file__, "--publish", str(size)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    places: dict[str, object] = {}
    while not places:
        line = await process.stdout.readline()
        places = json.loads(line) if line.startswith(b"{") else {}
    total = int(str(places["bytes"]))
    meter = Meter(process.pid)
    costs: dict[str, list[Cost]] = {}
    try:
        async with connect(str(places["grpc"]), bulk=True) as channel:
            roads: dict[str, Callable[[], Awaitable[object]]] = {
                "raw": lambda: asyncio.to_thread(raw_fetch, int(str(places["raw"])), total),
                "grpc": lambda: fetch_version(channel, "r", 1),
                "http": lambda: http_fetch(int(str(places["http"])), total),
                "shared": lambda: fetch_version(channel, "r", 1, transports=[SharedMemory()]),
            }
            first = await meter.measure(roads["shared"])
            for index in range(rounds + 1):
                for name, road in roads.items():
                    cost = await meter.measure(road)
                    # The first round warms both processes up.
                    if index:
                        costs.setdefault(name, []).append(cost)
                if index:
                    for name, cost in copies(total).items():
                        costs.setdefault(name, []).append(cost)
    finally:
        process.stdin.close()
        await process.wait()
    return figures(total, first, costs)


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
            for key in ("raw", "http", "shared")
        ),
        Figure(f"{label}: gRPC verified, both processes", cpu("grpc"), "CPU s/GiB", "<= 1.1"),
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--publish", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tune_allocator()
    if options.publish:
        asyncio.run(publisher(options.publish))
        return
    size = int(options.gib * GIB)
    report(asyncio.run(compare(size, options.rounds)), options.json, rounds=options.rounds)


if __name__ == "__main__":
    main()
