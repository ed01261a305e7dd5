"""What it costs a trainer to update a fleet: bytes that it sends, time until every replica has the version.

1. A publisher and 1, 2, 4, 8 replicas, each a process of its own that follows, verifies, holds and relays
   (benchmarks/light_replica.py), on one machine. Bar: the publisher sends at most 1.2 model sizes, manifests
   included, however many replicas follow. Deltas are sent about once as well.
2. Beside it, the same replicas without relays, all fetching from the publisher. On one machine the processors
   are shared by all, so the time tells what the relays cost, not what they gain on machines of their own.

    python benchmarks/relay.py [--size-mb 128] [--replicas 1 2 4 8] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from figures import Figure, arguments, report
from quartet.kit import logs
from quartet.kit.health import Health
from quartet.kit.memory import tune_allocator
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor

LIMIT_SECONDS = 300.0
TENSORS = 16
#: Of the values, in the update that travels as a delta.
CHANGED = 0.01


class CountingServicer(WeightServicer):
    """The trainer's servicer; counts the bytes of what it sends."""

    sent = 0

    async def GetManifest(
        self, request: pb.GetManifestRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetManifestResponse:
        """Describe a version."""
        request.shared_memory = False  # what is shared on one machine is sent between two
        response = await super().GetManifest(request, context)
        self.sent += response.ByteSize()
        return response

    async def fetch_encoded(
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Stream a payload."""
        async for frame in super().fetch_encoded(request, context):
            self.sent += len(frame)
            yield frame


class Replica:
    """A process of light_replica.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, publisher: str, relays: bool) -> Replica:
        script = Path(__file__).with_name("light_replica.py")
        command = [sys.executable, str(script), publisher, *([] if relays else ["--no-relay"])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        replica = cls(
            await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
        )
        await replica._line("address")
        return replica

    async def served(self, version: int) -> float:
        """When it serves the version."""
        while True:
            line = await self._line("version")
            if line["version"] == version:
                return float(line["at"])

    async def stop(self) -> None:
        """End it."""
        self._process.kill()
        await self._process.wait()

    async def _line(self, key: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                text = await self._process.stdout.readline()
                assert text, "the replica has ended"
                line: dict[str, Any] = json.loads(text)
                if key in line:
                    return line
                print(line, file=sys.stderr)


def as_tensors(values: np.ndarray[Any, np.dtype[np.uint16]]) -> dict[str, Tensor]:
    """The values as bfloat16 tensors."""
    parts = np.split(values, TENSORS)
    return {f"w{i:02}": Tensor("BF16", (len(p),), p.tobytes()) for i, p in enumerate(parts)}


async def measure(count: int, size: int, relays: bool) -> list[Figure]:
    """Publish a full version and a delta to so many replicas."""
    rng = np.random.default_rng(count)
    values = rng.integers(0, 2**16, size // 2, np.uint16)
    store = WeightStore(keep=2)
    servicer = CountingServicer(store)
    server = await start([Service(SERVICE, add_weight_service, servicer)], ServerConfig(), Health())
    replicas = await asyncio.gather(*(Replica.start(server.address, relays) for _ in range(count)))
    figures = []
    kind = "relays" if relays else "direct"
    try:
        for version, name in enumerate(("full", "delta")):
            if version:
                values = values.copy()
                values[rng.choice(len(values), int(CHANGED * len(values)), replace=False)] ^= 1
            tensors = as_tensors(values)
            servicer.sent = 0
            await asyncio.to_thread(store.publish, "run", version, tensors)
            began = time.time()
            ended = await asyncio.gather(*(replica.served(version) for replica in replicas))
            sizes = servicer.sent / size
            bar = "" if not relays else "<= 1.2" if name == "full" else f"<= {1.2 * 2 * CHANGED:g}"
            figures.append(Figure(f"{kind}, {count} replicas, {name}: sent", sizes, "model sizes", bar))
            figures.append(Figure(f"{kind}, {count} replicas, {name}: time", max(ended) - began, "s"))
    finally:
        for replica in replicas:
            await replica.stop()
        await server.stop(0)
    return figures


async def main() -> None:
    """Measure every count, with relays and without."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--size-mb", type=int, default=128)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    given = parser.parse_args()
    logs.configure("benchmark", "error")
    tune_allocator()
    figures: list[Figure] = []
    for count in given.replicas:
        for relays in (True, False):
            figures += await measure(count, given.size_mb << 20, relays)
    report(figures, given.json, size_mb=given.size_mb, cpus=os.cpu_count())


if __name__ == "__main__":
    asyncio.run(main())
