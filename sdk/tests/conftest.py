"""Makes the modules that several of these tests share importable by their names; the fixtures of several."""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from quartet.cli.tiny.files import PHRASES, write_model_files
from quartet.config import load
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.run.config import RunConfig
from quartet.v1 import weights_pb2_grpc as rpc
from quartet.weights import fetch, push
from quartet.weights.service import SERVICE, WeightServicer
from quartet.weights.store import WeightStore

sys.path.insert(0, str(Path(__file__).resolve().parent))

if TYPE_CHECKING:
    from push_taker import Taker
    from weight_plane import Plane


@pytest.fixture(scope="module", autouse=True)
def left_alone() -> Iterator[None]:
    """What the tests of a module imported stays (mlflow, TRL: a million objects). The garbage collector,
    which some of the later ones call, need not look through it again; as in the repository's conftest.py."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with all but its weights, which the trainer alone reads."""
    path = tmp_path_factory.mktemp("chat") / "model"
    write_model_files(path, PHRASES)
    (path / "model.safetensors").touch()
    return path


@pytest.fixture
def socket_address() -> Iterator[str]:
    """Of a Unix socket in a folder of its own, whose path is short enough."""
    with tempfile.TemporaryDirectory(prefix="rewards-", dir="/tmp") as folder:
        yield f"unix:{folder}/socket"


@pytest.fixture
def config() -> RunConfig:
    """Of the main job."""
    from planned_runs import CONFIG

    return load(RunConfig, ["@", str(CONFIG)]).config


@pytest.fixture
async def plane(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plane]:
    """A faulty publisher, without versions yet, and a channel to it."""
    from weight_plane import FaultyWeights, Plane

    monkeypatch.setattr(fetch, "BACKOFF_SECONDS", (0.001, 0.01))
    store = WeightStore(keep=2)
    servicer = FaultyWeights(store)
    offered = Service(SERVICE, rpc.add_WeightServiceServicer_to_server, servicer)
    server = await start([offered], ServerConfig(), Health())
    channel = connect(server.address, bulk=True)
    yield Plane(store, servicer, channel)
    await channel.close()
    await server.stop(0)


@pytest.fixture
async def taker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Taker]:
    """A replica that takes pushes, and a channel to it."""
    from push_taker import Taker, offer, take

    monkeypatch.setattr(push, "RETRY_SECONDS", 0.01)
    servicer = WeightServicer(WeightStore(keep=2), accept_push=take)
    server = await offer(servicer)
    channel = connect(server.address, bulk=True)
    yield Taker(servicer, server.address, channel)
    await channel.close()
    await server.stop(0)


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with certificates."""
    from certificates import write_certificates

    directory = tmp_path_factory.mktemp("pki")
    write_certificates(directory)
    return directory
