"""Shared memory: the same bytes without a network, never changed under a reader, gone with their use."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

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
from quartet.weights.shared import NAME, SEALS, TOKEN_BYTES, SharedMemory, SharedPayloads
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor


def model(seed: int = 0, size: int = 1000) -> dict[str, Tensor]:
    values = np.random.default_rng(seed).random(size, np.float32)
    return {"norm": Tensor("F32", (3,), values[:3].copy().data), "w": Tensor("F32", (size,), values.data)}


class Plane:
    """A publisher, how often its payloads were fetched, and a channel to it."""

    def __init__(self, store: WeightStore, servicer: WeightServicer, channel: grpc.aio.Channel) -> None:
        self.store, self.servicer, self.channel = store, servicer, channel
        self.fetches = 0


@pytest.fixture
async def plane() -> AsyncIterator[Plane]:
    gc.collect()  # what earlier tests offer may be in a cycle that nobody has looked for
    store = WeightStore(keep=1)
    servicer = WeightServicer(store)
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


def offered() -> list[str]:
    """The paths of all shared memory that this process offers: mappings hold read-only descriptors."""
    folder = Path(f"/proc/{os.getpid()}/fd")
    links = [folder / name for name in os.listdir(folder)]
    # The descriptor of the listing itself is gone by now.
    ours = [path for path in links if path.is_symlink() and NAME in str(path.readlink())]
    return [str(path) for path in ours if path.lstat().st_mode & stat.S_IWUSR]


async def test_a_version_comes_through_shared_memory_and_only_when_asked_for(plane: Plane) -> None:
    plane.store.publish("r", 1, model())
    assert (await fetch_version(plane.channel, "r", 1)).tensors == model()
    assert plane.fetches == 1 and offered() == []
    for _ in range(2):
        fetched = await fetch_version(plane.channel, "r", 1, transports=[SharedMemory()])
        assert fetched.tensors == model() and fetched.manifest == plane.store.get("r", 1).manifest
    assert plane.fetches == 1 and len(offered()) == 1


async def test_a_delta_comes_through_shared_memory_too(plane: Plane) -> None:
    plane.store._keep = 2
    plane.store.publish("r", 1, model())
    plane.store.publish("r", 2, model() | {"norm": model(1)["norm"]})
    base = await fetch_version(plane.channel, "r", 1)
    fetched = await fetch_version(plane.channel, "r", 2, base, transports=[SharedMemory()])
    assert fetched.tensors == model() | {"norm": model(1)["norm"]}
    assert len(fetched.deltas) == 1 and plane.fetches == 1
    relay = WeightStore(keep=1)
    relay.hold(base)
    relay.hold(fetched)
    key = (1, bytes(base.manifest.digest))
    assert relay.payload("r", 2, key).digests() == plane.store.payload("r", 2, key).digests()


async def test_it_goes_with_its_payload_and_a_reader_keeps_what_it_mapped(plane: Plane) -> None:
    plane.store.publish("r", 1, model())
    fetched = await fetch_version(plane.channel, "r", 1, transports=[SharedMemory()])
    plane.store.publish("r", 2, model(2))
    gc.collect()
    assert offered() == [] and fetched.tensors == model()


def test_nobody_can_change_or_shorten_what_is_mapped() -> None:
    """A mapping of a file that another process cuts short ends its reader with SIGBUS."""
    made, payload = SharedPayloads(), full_payload(model())
    offer = made.offer(payload)
    assert offer is not None
    with open(offer.path, "r+b") as file:
        for damage in (lambda: file.truncate(1), lambda: file.truncate(1 << 30), lambda: file.write(b"x")):
            with pytest.raises(PermissionError):
                damage()
                file.flush()
        with pytest.raises(PermissionError):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, 0)
        # What the buffered writer could not write must not be tried again when it is closed.
        file.raw.close()


def test_it_is_bounded_in_bytes() -> None:
    """Invariant 8."""
    payloads = [full_payload(model(seed)) for seed in range(3)]
    made = SharedPayloads(limit_bytes=2 * payloads[0].size)
    offers = [made.offer(payload) for payload in payloads]
    assert all(offers) and len(offered()) == 2
    assert offers[0].path not in offered() or offers[0].path == offers[2].path  # type: ignore[union-attr]
    assert made.offer(full_payload(model(0, size=10_000))) is None
    del made, payloads
    gc.collect()
    assert offered() == []


def test_it_is_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 8."""
    monkeypatch.setattr(shared, "MAX_FILES", 2)
    made = SharedPayloads()
    payloads = [full_payload(model(seed)) for seed in range(4)]
    offers = [made.offer(payload) for payload in payloads]
    assert set(offered()) == {offer.path for offer in offers[-2:] if offer}


def test_no_room_means_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = full_payload(model())

    def statvfs(folder: str) -> SimpleNamespace:
        assert folder == "/dev/shm"
        return SimpleNamespace(f_bavail=payload.size - 1, f_frsize=1)

    with monkeypatch.context() as patched:
        patched.setattr(shared.os, "statvfs", statvfs)
        assert SharedPayloads().offer(payload) is None

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared.os, "write", full)
    assert SharedPayloads().offer(payload) is None and offered() == []


def _offer_and_hang() -> None:
    payload = full_payload(model())
    offer = SharedPayloads().offer(payload)
    assert offer is not None
    print(offer.path, flush=True)
    signal.pause()


def test_what_a_killed_publisher_shared_is_gone() -> None:
    """Invariant 9."""
    with subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        with path.open("rb") as opened:
            process.kill()
            process.wait()
            assert not path.exists()
            size = TOKEN_BYTES + full_payload(model()).size
            assert len(opened.read()) == size, "a reader keeps what it opened"


def _memory(name: str, content: bytes, seals: int = SEALS) -> str:
    """The path of another shared memory of this process, which stays open."""
    descriptor = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.write(descriptor, content)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _other_token(content: bytes, tmp_path: Path) -> str:
    return _memory(NAME, bytes(TOKEN_BYTES) + content[TOKEN_BYTES:])


def _shorter(content: bytes, tmp_path: Path) -> str:
    return _memory(NAME, content[:-1])


def _unsealed(content: bytes, tmp_path: Path) -> str:
    return _memory(NAME, content, fcntl.F_SEAL_WRITE)


def _another_name(content: bytes, tmp_path: Path) -> str:
    return _memory("secret", content)


def _flipped(content: bytes, tmp_path: Path) -> str:
    return _memory(NAME, content[:-1] + bytes([content[-1] ^ 1]))


def _gone(content: bytes, tmp_path: Path) -> str:
    path = _memory(NAME, content)
    os.close(int(path.rpartition("/")[2]))
    return path


def _a_file(content: bytes, tmp_path: Path) -> str:
    (tmp_path / f"{NAME}").write_bytes(content)
    return str(tmp_path / NAME)


def _a_file_s_descriptor(content: bytes, tmp_path: Path) -> str:
    return f"/proc/{os.getpid()}/fd/{os.open(_a_file(content, tmp_path), os.O_RDONLY)}"


def _a_way_round(content: bytes, tmp_path: Path) -> str:
    return _memory(NAME, content).replace("/fd/", "/../self/fd/")


@pytest.mark.parametrize(
    "other",
    [
        _other_token, _shorter, _unsealed, _another_name, _flipped, _gone,
        _a_file, _a_file_s_descriptor, _a_way_round,
    ],
)  # fmt: skip
async def test_what_is_not_sealed_memory_with_the_payload_is_fetched(
    plane: Plane, tmp_path: Path, other: Callable[[bytes, Path], str]
) -> None:
    """Invariant 3."""
    plane.store.publish("r", 1, model())
    offer = plane.servicer._shared.offer(plane.store.get("r", 1).payload)
    assert offer is not None
    payload = plane.store.get("r", 1).payload
    offer.path = other(offer.token + b"".join(payload.slices(0, payload.size)), tmp_path)
    fetched = await fetch_version(plane.channel, "r", 1, transports=[SharedMemory()])
    assert fetched.tensors == model() and plane.fetches == 1


if __name__ == "__main__":
    _offer_and_hang()
