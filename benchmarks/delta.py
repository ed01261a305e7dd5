"""Deltas: their size, what they cost to make and to apply, and a version end to end against the disk road.

Sizes and costs, for a model of bf16 weights (standard deviation 0.02), one core's CPU seconds:

1. `adamw`: the change is one AdamW step (beta 0.9, 0.95) on fp32 masters, after eight others, both cast to
   bf16. The learning rate is the one at which the wanted share of values changes; how many steps of bf16 the
   changed values moved is reported beside it.
2. `random`: so many values, at random places, replaced by random bits: the worst that can happen.
3. Encoding is `make_delta`; applying is `apply_delta`, which verifies every tensor. The result is compared
   bit by bit. Both begin with as much free memory at hand as the model has (fresh_memory.py). zstd(XOR) is
   the whole tensor XORed with its base, at level 1 or 3, whichever is smaller.

End to end, for models of several sizes, two processes, from the order to publish until the reader has the new
tensors in memory of its own:

4. `delta`: publish, manifest, fetch over loopback, apply, verify, with 1 % of the values changed by AdamW.
5. `disk`: safetensors written into a folder and synced, as whoever reads on another machine needs it; the
   file loaded (from the page cache) and every tensor copied; unverified.
6. `page cache`: the same without the sync: what only a reader on the same machine can do.
7. `shared memory`: the full payload, for a reader on the same machine, verified in place.

    python benchmarks/delta.py [--mib 256] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import fresh_memory
import grpc
import numpy as np
import torch
import zstandard
from changes import Bits, Change, adamw, random_bits, steps_moved
from figures import Figure, arguments, report
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.memory import tune_allocator
from quartet.kit.server import ServerConfig, Service, start
from quartet.weights.delta import apply_delta, make_delta
from quartet.weights.fetch import fetch_version
from quartet.weights.fetched import Fetched
from quartet.weights.manifest import build_manifest
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.shared import SharedMemory
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from safetensors.torch import load_file, save_file

MIB = 1 << 20
TENSOR_MIB = 16
END_TO_END_MIB = (16, 64, 256, 1024)


def on_the_wire(side: list[Bits]) -> dict[str, Tensor]:
    """One side of a model's changes, as services hand it on."""
    return {f"layers.{i}.weight": Tensor("BF16", bits.shape, bits.data) for i, bits in enumerate(side)}


def on_the_disk(side: list[Bits]) -> dict[str, torch.Tensor]:
    """The same as safetensors writes it."""
    return {
        f"layers.{i}.weight": torch.from_numpy(bits.copy()).view(torch.bfloat16)
        for i, bits in enumerate(side)
    }


def as_version(number: int, tensors: list[Bits]) -> Fetched:
    named = on_the_wire(tensors)
    return Fetched(build_manifest("r", number, named), named)


def xored_bytes(change: Change) -> int:
    differing = (change.before ^ change.after).data
    return min(len(zstandard.ZstdCompressor(level=level).compress(differing)) for level in (1, 3))


def codec(kind: str, share: float, mib: int, rounds: int) -> list[Figure]:
    """Size and costs of one kind of change."""
    count = TENSOR_MIB * MIB // 2
    make = adamw if kind == "adamw" else random_bits
    changes = [make(count, share, seed) for seed in range(max(1, mib // TENSOR_MIB))]
    base, new = (
        as_version(n, [getattr(one, side) for one in changes]) for n, side in enumerate(("before", "after"))
    )
    size = new.manifest.payload_bytes
    encode_s, apply_s = [], []
    for _ in range(rounds):
        fresh_memory.bring(size)
        began = time.process_time()
        delta = make_delta(base, new)
        encode_s.append(time.process_time() - began)
        received = memoryview(b"".join(delta.payload.parts))
        fresh_memory.bring(size)
        began = time.process_time()
        tensors = apply_delta(received, delta.manifest, base)
        apply_s.append(time.process_time() - began)
        assert tensors == new.tensors
    best = min(sum(map(xored_bytes, changes)), size)
    name = f"{kind}, {share:.1%} changed"
    bound = kind == "adamw" and share in (0.01, 0.4)
    figures = [
        Figure(
            f"{name}: delta",
            100 * delta.payload.size / size,
            "% of full",
            "<= 1" if bound and share < 0.1 else "",
        ),
        Figure(f"{name}: delta / best of zstd(XOR) and dense", delta.payload.size / best, "x", "<= 1"),
        Figure(
            f"{name}: encode", size / 1e6 / statistics.median(encode_s), "MB/CPU s", ">= 500" if bound else ""
        ),
        Figure(
            f"{name}: apply", size / 1e6 / statistics.median(apply_s), "MB/CPU s", ">= 500" if bound else ""
        ),
    ]
    if kind == "adamw":
        moved = steps_moved(changes[0])
        one, few = (100 * float(np.mean(moved <= limit)) for limit in (1, 8))
        figures += [
            Figure(f"{name}: learning rate", changes[0].learning_rate, ""),
            Figure(f"{name}: changed values that moved one step of bf16", one, "%"),
            Figure(f"{name}: changed values that moved up to 8", few, "%"),
        ]
    return figures


# End to end.


def model(mib: int) -> list[Change]:
    """A model whose next version differs in 1 % of its values."""
    tensor_mib = min(mib, TENSOR_MIB)
    # Every tensor is drawn from the same few: drawing takes longer than everything that is measured.
    drawn = [adamw(tensor_mib * MIB // 2, 0.01, seed) for seed in range(min(4, mib // tensor_mib))]
    return [drawn[index % len(drawn)] for index in range(mib // tensor_mib)]


async def publisher(mib: int, folder: Path) -> None:
    """Publish or write a version for every line that says so."""
    changes = model(mib)
    sides = [[one.before for one in changes], [one.after for one in changes]]
    wire = [on_the_wire(side) for side in sides]
    tensors = [on_the_disk(side) for side in sides]
    store = WeightStore(keep=2)
    store.publish("r", 0, wire[0])
    server = await start(
        [Service(SERVICE, add_weight_service, WeightServicer(store))], ServerConfig(), Health()
    )
    print(json.dumps({"grpc": server.address}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        road, number = line.split()
        if road == "publish":
            await asyncio.to_thread(store.publish, "r", int(number), wire[int(number) % 2])
        else:
            await asyncio.to_thread(write, tensors[int(number) % 2], folder / number, synced=road == "disk")
        print(json.dumps({"done": number}), flush=True)
    await server.stop(0)


def write(tensors: dict[str, torch.Tensor], path: Path, *, synced: bool) -> None:
    save_file(tensors, path)
    if synced:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def reload(path: Path) -> object:
    loaded = {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.unlink()
    return loaded


class Publisher:
    """The other process."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.process, self.folder = process, folder

    async def answer(self) -> dict[str, str]:
        """The next line that is for us; logs are passed over."""
        assert self.process.stdout is not None
        while True:
            line = await self.process.stdout.readline()
            if line.startswith(b"{"):
                return dict(json.loads(line))

    async def timed(self, road: str, number: int, finish: Callable[[], Awaitable[object]]) -> float:
        """From the order until `finish` has the tensors."""
        assert self.process.stdin is not None
        began = time.perf_counter()
        self.process.stdin.write(f"{road} {number}\n".encode())
        await self.answer()
        kept = await finish()
        wall_s = time.perf_counter() - began
        del kept
        return wall_s


async def end_to_end(mib: int, rounds: int) -> list[Figure]:
    """The roads in turns, each from the version before."""
    seconds: dict[str, list[float]] = {"delta": [], "disk": [], "page_cache": [], "shared": []}
    with tempfile.TemporaryDirectory(prefix="quartet-delta-") as folder:
        command = [sys.executable, __file__, "--publish", str(mib), "--folder", folder]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        other = Publisher(process, Path(folder))
        async with connect((await other.answer())["grpc"], bulk=True) as channel:
            base = await fetch_version(channel, "r", 0)
            for number in range(1, 2 * (rounds + 1), 2):
                wall_s, base = await one_round(other, channel, number, base)
                for road, one in wall_s.items():
                    seconds[road].append(one)
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
    # The first round warms both processes up.
    took = {road: each[1:] for road, each in seconds.items()}

    def faster(road: str, rival: str) -> float:
        return statistics.median(b / a for a, b in zip(took[road], took[rival], strict=True))

    name = f"{mib} MiB end to end"
    return [
        *(Figure(f"{name}: {road}", 1000 * statistics.median(each), "ms") for road, each in took.items()),
        Figure(f"{name}: disk / delta", faster("delta", "disk"), "x", ">= 1"),
        Figure(f"{name}: page cache / delta", faster("delta", "page_cache"), "x", ">= 1"),
        Figure(f"{name}: page cache / shared memory", faster("shared", "page_cache"), "x", ">= 1"),
    ]


async def one_round(
    other: Publisher, channel: grpc.aio.Channel, number: int, base: Fetched
) -> tuple[dict[str, float], Fetched]:
    """Two versions: one by delta and by both files, the next through shared memory."""
    held = [base]

    async def by_delta() -> None:
        held.append(await fetch_version(channel, "r", number, held[-1]))
        assert held[-1].deltas

    async def by_sharing() -> Fetched:
        return await fetch_version(channel, "r", number + 1, transports=[SharedMemory()])

    def by_file() -> Awaitable[object]:
        return asyncio.to_thread(reload, other.folder / str(number))

    wall_s = {"delta": await other.timed("publish", number, by_delta)}
    wall_s["disk"] = await other.timed("disk", number, by_file)
    wall_s["page_cache"] = await other.timed("page_cache", number, by_file)
    wall_s["shared"] = await other.timed("publish", number + 1, by_sharing)
    # The base of the next round's delta, fetched beside the measurements.
    return wall_s, await fetch_version(channel, "r", number + 1, held[-1])


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--mib", type=int, default=256, help="size of the model of which sizes and costs are told"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--publish", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tune_allocator()
    torch.set_num_threads(1)
    if options.publish:
        asyncio.run(publisher(options.publish, options.folder))
        return
    figures = []
    for kind in ("adamw", "random"):
        for share in (0.003, 0.01, 0.1, 0.4, 0.9):
            figures += codec(kind, share, options.mib, options.rounds)
    for mib in END_TO_END_MIB:
        figures += asyncio.run(end_to_end(mib, options.rounds))
    report(figures, options.json, rounds=options.rounds)


if __name__ == "__main__":
    main()
