"""Shared memory: the same bytes without a network, and never a file that outlives its use."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import weights_pb2 as pb
from quartet.weights import shared
from quartet.weights.fetch import fetch_version
from quartet.weights.payload import full_payload
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.shared import PREFIX, TOKEN_BYTES, SharedMemory, SharedPayloads, sweep
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor


def model(seed: int = 0, size: int = 1000) -> dict[str, Tensor]:
    values = np.random.default_rng(seed).random(size, np.float32)
    return {"norm": Tensor("F32", (3,), values[:3].copy().data), "w": Tensor("F32", (size,), values.data)}


class Plane:
    """A publisher with shared memory in a folder of its own, and a channel to it."""

    def __init__(self, store: WeightStore, servicer: WeightServicer, channel: grpc.aio.Channel) -> None:
        self.store, self.servicer, self.channel = store, servicer, channel
        self.fetches = 0


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    store = WeightStore(keep=1)
    servicer = WeightServicer(store)
    servicer._shared = SharedPayloads(folder=tmp_path)
    made = Plane(store, servicer, None)
    payload = servicer._payload

    async def counted(request: pb.FetchRequest) -> object:
        made.fetches += 1
        return await payload(request)

    servicer._payload = counted  # type: ignore[method-assign, assignment]
    server = await start([Service(SERVICE, add_weight_service, servicer)], ServerConfig(), Health())
    made.channel = connect(server.address, bulk=True)
    yield made
    await made.channel.close()
    await server.stop(0)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


async def test_a_version_comes_through_shared_memory_and_only_when_asked_for(
    plane: Plane, tmp_path: Path
) -> None:
    plane.store.publish("r", 1, model())
    assert (await fetch_version(plane.channel, "r", 1)).tensors == model()
    assert plane.fetches == 1 and files(tmp_path) == []
    for _ in range(2):
        fetched = await fetch_version(plane.channel, "r", 1, transports=[SharedMemory(tmp_path)])
        assert fetched.tensors == model() and fetched.manifest == plane.store.get("r", 1).manifest
    assert plane.fetches == 1 and len(files(tmp_path)) == 1
    assert files(tmp_path)[0].stat().st_mode & 0o777 == 0o600


async def test_a_delta_comes_through_shared_memory_too(plane: Plane, tmp_path: Path) -> None:
    plane.store._keep = 2
    plane.store.publish("r", 1, model())
    plane.store.publish("r", 2, model() | {"norm": model(1)["norm"]})
    base = await fetch_version(plane.channel, "r", 1)
    fetched = await fetch_version(plane.channel, "r", 2, base, transports=[SharedMemory(tmp_path)])
    assert fetched.tensors == model() | {"norm": model(1)["norm"]}
    assert len(fetched.deltas) == 1 and plane.fetches == 1
    relay = WeightStore(keep=1)
    relay.hold(base)
    relay.hold(fetched)
    key = (1, bytes(base.manifest.digest))
    assert relay.payload("r", 2, key).digest == plane.store.payload("r", 2, key).digest


async def test_files_go_with_their_payload_and_a_reader_keeps_what_it_mapped(
    plane: Plane, tmp_path: Path
) -> None:
    plane.store.publish("r", 1, model())
    fetched = await fetch_version(plane.channel, "r", 1, transports=[SharedMemory(tmp_path)])
    plane.store.publish("r", 2, model(2))
    gc.collect()
    assert files(tmp_path) == [] and fetched.tensors == model()


def test_files_are_bounded_in_bytes(tmp_path: Path) -> None:
    """Invariant 8."""
    payloads = [full_payload(model(seed)) for seed in range(3)]
    made = SharedPayloads(limit_bytes=2 * payloads[0].size, folder=tmp_path)
    offers = [made.offer(payload) for payload in payloads]
    assert all(offers) and len(files(tmp_path)) == 2
    assert not Path(offers[0].path).exists()  # type: ignore[union-attr]
    assert made.offer(full_payload(model(0, size=10_000))) is None
    del made, payloads
    gc.collect()
    assert files(tmp_path) == []


def test_files_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Invariant 8."""
    monkeypatch.setattr(shared, "MAX_FILES", 2)
    made = SharedPayloads(folder=tmp_path)
    payloads = [full_payload(model(seed)) for seed in range(4)]
    offers = [made.offer(payload) for payload in payloads]
    assert {str(path) for path in files(tmp_path)} == {offer.path for offer in offers[-2:] if offer}


def test_no_room_means_no_offer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared.os, "write", full)
    assert SharedPayloads(folder=tmp_path).offer(full_payload(model())) is None
    assert files(tmp_path) == []


def _offer_and_hang(folder: Path) -> None:
    payload = full_payload(model())
    print(SharedPayloads(folder=folder).offer(payload), flush=True)
    signal.pause()


async def test_files_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    """Invariant 9."""
    mine = SharedPayloads(folder=tmp_path)
    payload = full_payload(model(1))
    mine.offer(payload)
    command = [sys.executable, __file__, str(tmp_path)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None and await asyncio.wait_for(process.stdout.readline(), 60)
    sweep(tmp_path)
    assert len(files(tmp_path)) == 2
    process.kill()
    await process.wait()
    assert len(files(tmp_path)) == 2
    sweep(tmp_path)
    assert [path.name.split("-")[2] for path in files(tmp_path)] == [str(os.getpid())]


def _other_token(file: Path, offer: pb.SharedPayload) -> None:
    with file.open("r+b") as opened:
        opened.write(bytes(TOKEN_BYTES))


def _shorter(file: Path, offer: pb.SharedPayload) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _gone(file: Path, offer: pb.SharedPayload) -> None:
    file.unlink()


def _elsewhere(file: Path, offer: pb.SharedPayload) -> None:
    folder = file.parent / "elsewhere"
    folder.mkdir()
    offer.path = str(file.rename(folder / file.name))


def _a_link(file: Path, offer: pb.SharedPayload) -> None:
    target = file.rename(file.with_name("secret"))
    file.symlink_to(target)


def _another_name(file: Path, offer: pb.SharedPayload) -> None:
    offer.path = str(file.rename(file.with_name("secret")))


def _flipped(file: Path, offer: pb.SharedPayload) -> None:
    with file.open("r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        opened.write(b"x")


@pytest.mark.parametrize(
    "damage", [_other_token, _shorter, _gone, _elsewhere, _a_link, _another_name, _flipped]
)
async def test_what_cannot_be_mapped_or_is_not_the_payload_is_fetched(
    plane: Plane, tmp_path: Path, damage: object
) -> None:
    """Invariant 3."""
    plane.store.publish("r", 1, model())
    offer = plane.servicer._shared.offer(plane.store.get("r", 1).payload)
    assert offer is not None and Path(offer.path).name.startswith(PREFIX)
    damage(Path(offer.path), offer)  # type: ignore[operator]
    fetched = await fetch_version(plane.channel, "r", 1, transports=[SharedMemory(tmp_path)])
    assert fetched.tensors == model() and plane.fetches == 1


if __name__ == "__main__":
    _offer_and_hang(Path(sys.argv[1]))
