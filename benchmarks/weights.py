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

import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import roads
from figures import Figure, arguments, report
from roads import PUBLISHER_OF, Cost

GIB = 1 << 30
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
#: Until a reader's memory was written before.
WARM_UP_ROUNDS = 2
TICKS = os.sysconf("SC_CLK_TCK")


class Child:
    """A process that does one part of one road."""

    def __init__(self, stack: ExitStack, *part: object) -> None:
        command = [sys.executable, roads.__file__, *map(str, part)]
        pipe = subprocess.PIPE
        self._process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))

    def told(self) -> list[Any]:
        """The next line that is for us; logs are passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("["):
                return list(json.loads(line))
        raise RuntimeError(f"{self._process.args!r} ended")

    def go(self) -> list[Any]:
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
    wall_s, cpu_s = reader.go()
    if publisher:
        cpu_s += publisher.cpu_s() - before_s
    return Cost(wall_s, cpu_s)


def compare(size: int, rounds: int) -> list[Figure]:
    """Start every process, and alternate between the roads."""
    costs: dict[str, list[Cost]] = {road: [] for road in NAMES}
    with ExitStack() as stack:
        publishers = {road: Child(stack, "publish", road, size) for road in set(PUBLISHER_OF.values())}
        told = {road: publisher.told() for road, publisher in publishers.items()}
        (total,) = {payload_bytes for _, payload_bytes in told.values()}
        readers = {}
        for road in NAMES:
            place = told[PUBLISHER_OF[road]][0] if road in PUBLISHER_OF else ""
            readers[road] = Child(stack, "read", road, total, place)
        turns = list(NAMES)
        for _ in range(WARM_UP_ROUNDS + rounds):
            for road in turns:
                publisher = publishers[PUBLISHER_OF[road]] if road in PUBLISHER_OF else None
                costs[road].append(measure(readers[road], publisher))
            turns = [*turns[1:], turns[0]]
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
    options = parser.parse_args()
    report(compare(int(options.gib * GIB), options.rounds), options.json, rounds=options.rounds)


if __name__ == "__main__":
    main()
