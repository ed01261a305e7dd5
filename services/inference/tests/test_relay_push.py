"""Versions that a foreign trainer pushes into a replica; and replicas that follow that one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pydantic
import pytest
from loopback import LOOPBACK
from quartet.errors import QuartetError
from quartet.inference import INFERENCE, concerning
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1 import inference_service_pb2_grpc as irpc
from quartet.weights import fetch, sources
from quartet.weights.fetch import get_manifest
from quartet.weights.push import push_version
from quartet.weights.service import SERVICE, WeightServicer, add_weight_service
from quartet.weights.store import WeightStore
from quartet_inference import app, updates
from quartet_inference.config import InferenceConfig
from quartet_inference.embedded.engine import EmbeddedEngine

from .adapters import random_adapter
from .random_models import weights_of

Make = Callable[..., Any]


class Replica:
    """A running service and its channel."""

    def __init__(self, channel: Any, address: str, health: Health) -> None:
        self.channel, self.address, self.health = channel, address, health
        self._stub: Any = irpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]

    async def until(self, true: Callable[[Any], bool]) -> Any:
        async with asyncio.timeout(30):
            while not true(model := await self._stub.GetModel(ipb.GetModelRequest(), timeout=5)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return model

    async def serves(self, digest: bytes) -> Any:
        return await self.until(lambda model: model.weights_digest == digest)


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Replica]:
    embedded: Any = {"kv_cache_bytes": 1 << 24, "max_num_seqs": 4}
    config = InferenceConfig(model=folder, max_model_len=256, embedded=embedded, **settings)
    health = Health()
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with app.services(config, health, bound) as services:
        server = await start(services, config.server, health)
        bound.set_result(server.address)
        async with connect(server.address, bulk=True) as channel:
            yield Replica(channel, server.address, health)
        await server.stop(0)


class Counting(WeightServicer):
    """The trainer's servicer; counts the streams that it is asked for, and may let nobody in."""

    streams = 0
    refuses = False

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        if self.refuses:
            raise QuartetError("UNAUTHENTICATED", "not now")
        async for response in super().Watch(request, context):
            yield response

    async def fetch_encoded(self, request: Any, context: Any) -> AsyncGenerator[bytes, None]:
        self.streams += 1
        async for frame in super().fetch_encoded(request, context):
            yield frame


async def test_services_relay_to_each_other(model_folder: Path, make_model: Make) -> None:
    store = WeightStore(keep=2)
    trainer = Counting(store)
    server = await start([Service(SERVICE, add_weight_service, trainer)], ServerConfig(), Health())
    following = {"weights_address": server.address, "shared_memory": False}
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(serving(model_folder, **following)) for _ in range(3)]
        alone = await stack.enter_async_context(serving(model_folder, **following, relay=False))
        async with asyncio.timeout(30):
            while len(trainer._relays._relays.get("", [])) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for version in range(3):
            manifest = await asyncio.to_thread(
                store.publish, "r", version, weights_of(make_model(version + 1))
            )
            for replica in (*replicas, alone):
                await replica.serves(manifest.digest)
            assert trainer.streams == version + 1
    await server.stop(0)


def adapters(model: Any) -> dict[str, int]:
    return {one.run_id: one.policy_version for one in model.adapters}


@pytest.mark.parametrize("run_id", ["", "a"])
async def test_adapters_are_fetched_from_their_publisher_whoever_relays(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch, run_id: str
) -> None:
    """A replica is told to others as a source of its run, and hands no adapters on: nobody waits for it
    there, not the replica itself, nor one that comes later."""
    monkeypatch.setattr(sources, "BEGIN_SECONDS", (60.0, 60.0))  # longer than this takes where nobody waits
    base, store = make_model(0), WeightStore(keep=2)
    trainer = Counting(store)
    server = await start([Service(SERVICE, add_weight_service, trainer)], ServerConfig(), Health())
    following = {"weights_address": server.address, "shared_memory": False, "run_id": run_id}
    store.open_run("a")
    async with serving(model_folder, **following) as first, asyncio.timeout(50):
        for version in range(2):
            adapter = random_adapter(base, version)
            store.publish("a", version, adapter.tensors, adapter_config=adapter.config)
            await first.until(lambda model, version=version: adapters(model) == {"a": version})  # type: ignore[misc]
        assert trainer._relays._relays[run_id], "it relays"
        async with serving(model_folder, **following) as second:
            await second.until(lambda model: adapters(model) == {"a": 1})
    await server.stop(0)


@pytest.mark.parametrize("shared_memory", [True, False])
async def test_what_is_pushed_is_served_and_handed_on(
    model_folder: Path, make_model: Make, shared_memory: bool
) -> None:
    async with (
        serving(model_folder, accept_push=True) as first,
        serving(model_folder, weights_address=first.address, shared_memory=shared_memory) as second,
    ):
        assert first.health.why_not(INFERENCE) == "", "its folder's own weights are served until then"
        assert "no verified weights" in second.health.why_not(INFERENCE)
        base = await push_version(first.channel, "mine", 1, weights_of(make_model(1)))
        for replica in (first, second):
            model = await replica.serves(base.manifest.digest)
            assert (model.run_id, model.policy_version, model.updates_applied) == ("mine", 1, 1)
        delta = await push_version(first.channel, "mine", 2, weights_of(make_model(2)), base=base)
        for replica in (first, second):
            assert (await replica.serves(delta.manifest.digest)).policy_version == 2


async def test_a_pushed_version_that_does_not_fit_leaves_the_old_one(
    model_folder: Path, make_model: Make
) -> None:
    """And its trainer is told so by the push itself, before it has sent the weights."""
    async with serving(model_folder, accept_push=True, run_id="mine") as replica:
        await push_version(replica.channel, "other", 9, weights_of(make_model(3)))
        sound = await push_version(replica.channel, "mine", 1, weights_of(make_model(1)))
        await replica.serves(sound.manifest.digest)
        whole = weights_of(make_model(2))
        renamed = {f"module.{name}": tensor for name, tensor in whole.items()}
        for unfit in (dict(list(whole.items())[:2]), renamed):
            with pytest.raises(QuartetError, match=r"INVALID_REQUEST: the version lacks \d+ tensors"):
                await push_version(replica.channel, "mine", 2, unfit)
        await push_version(replica.channel, "other", 10, renamed)  # held for others, not served here
        assert (await replica.serves(sound.manifest.digest)).policy_version == 1
        mended = await push_version(replica.channel, "mine", 3, weights_of(make_model(2)))
        await replica.serves(mended.manifest.digest)


async def test_that_an_adapter_was_refused_is_told_until_one_is_served(
    model_folder: Path, make_model: Make
) -> None:
    adapter = random_adapter(make_model(0), 1)
    async with serving(model_folder, accept_push=True) as replica:
        unfit = dict(list(adapter.tensors.items())[:1])
        await push_version(replica.channel, "mine", 0, unfit, adapter_config=adapter.config)
        model = await replica.until(lambda model: bool(model.update_refused))
        assert "version 0 could not be taken: adapter refused" in model.update_refused
        await push_version(replica.channel, "mine", 1, adapter.tensors, adapter_config=adapter.config)
        await replica.until(lambda model: adapters(model) == {"mine": 1})
        async with asyncio.timeout(30):
            await replica.until(lambda model: not model.update_refused)


async def test_that_no_adapters_were_announced_is_told_until_they_are(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a trainer whose token was changed before the replica's. The adapter has a follower of its own."""
    for module in (fetch, updates):
        monkeypatch.setattr(module, "BACKOFF_SECONDS", (0.1, 0.2))
    store, adapter = WeightStore(keep=2), random_adapter(make_model(0), 1)
    trainer = Counting(store)
    services = [Service(SERVICE, add_weight_service, trainer)]
    server = await start(services, ServerConfig(address=f"{LOOPBACK}:0"), Health())
    store.publish("a", 0, adapter.tensors, adapter_config=adapter.config)
    async with serving(model_folder, weights_address=server.address, shared_memory=False) as replica:
        await replica.until(lambda model: adapters(model) == {"a": 0})
        trainer.refuses = True
        await server.stop(0)
        server = await start(services, ServerConfig(address=server.address), Health())
        said = "versions are not announced: not now"
        await replica.until(lambda model: concerning(model.update_refusals, "a") == said)
        await replica.until(lambda model: concerning(model.update_refusals, "another") == said)
        trainer.refuses = False
        async with asyncio.timeout(30):
            await replica.until(lambda model: not model.update_refused)
    await server.stop(0)


@pytest.mark.parametrize("whole", [True, False])
async def test_that_no_versions_were_announced_is_told_no_longer_than_that_and_hides_no_refusal(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """The version that does not fit stays the newest: no other news makes anybody forget what was told."""
    for module in (fetch, updates):
        monkeypatch.setattr(module, "BACKOFF_SECONDS", (0.1, 0.2))
    store, adapter = WeightStore(keep=2), random_adapter(make_model(0), 1)
    tensors, config = (weights_of(make_model(1)), "") if whole else (adapter.tensors, adapter.config)
    trainer = Counting(store)
    services = [Service(SERVICE, add_weight_service, trainer)]
    server = await start(services, ServerConfig(address=f"{LOOPBACK}:0"), Health())
    store.publish("a", 0, tensors, adapter_config=config)
    async with serving(model_folder, weights_address=server.address, shared_memory=False) as replica:

        async def told(run_id: str, why: str) -> None:
            await replica.until(lambda model: concerning(model.update_refusals, run_id) == why)

        await replica.until(
            lambda model: adapters(model) == ({} if whole else {"a": 0}) and bool(model.run_id) == whole
        )
        store.publish("a", 1, dict(list(tensors.items())[:1]), adapter_config=config)
        model = await replica.until(lambda model: "version 1" in model.update_refused)
        refused, not_now = concerning(model.update_refusals, "a"), "versions are not announced: not now"
        trainer.refuses = True
        await server.stop(0)
        server = await start(services, ServerConfig(address=server.address), Health())
        await told("another", not_now)
        await asyncio.sleep(0.5)  # whoever follows has tried again by then
        model = await replica.until(lambda model: not_now in model.update_refused)
        assert refused in concerning(model.update_refusals, "a")
        trainer.refuses = False
        await told("another", "")
        await told("a", refused)
    await server.stop(0)


async def test_of_runs_that_push_the_last_ones_are_held_and_that_of_run_id(
    model_folder: Path, make_model: Make
) -> None:
    values = weights_of(make_model(1))
    async with serving(model_folder, accept_push=True, run_id="mine") as replica:
        sound = await push_version(replica.channel, "mine", 1, values)
        await replica.serves(sound.manifest.digest)
        for run in range(65):
            await push_version(replica.channel, f"other-{run}", 0, values)
        for held in ("mine", "other-63", "other-64"):
            assert (await get_manifest(replica.channel, held)).digest == sound.manifest.digest
        for gone in ("other-0", "other-62"):
            with pytest.raises(QuartetError, match="RUN_UNKNOWN"):
                await get_manifest(replica.channel, gone)


async def test_pushes_are_refused_where_they_are_not_asked_for(model_folder: Path, make_model: Make) -> None:
    async with serving(model_folder) as replica:
        with pytest.raises(QuartetError, match="NOT_IMPLEMENTED"):
            await push_version(replica.channel, "mine", 1, weights_of(make_model(1)))
    with pytest.raises(pydantic.ValidationError, match="accept_push"):
        InferenceConfig(model=model_folder, accept_push=True, weights_address="127.0.0.1:1")


async def test_of_runs_that_push_the_version_that_came_last_is_served(
    model_folder: Path, make_model: Make
) -> None:
    """Also where its run pushed before the others did, and where it is held since then."""
    models = [weights_of(make_model(seed)) for seed in range(3)]
    async with serving(model_folder, accept_push=True) as replica:

        async def pushed(run_id: str, version: int, weights: Any) -> None:
            await push_version(replica.channel, run_id, version, weights)
            await replica.until(lambda model: (model.run_id, model.policy_version) == (run_id, version))

        await pushed("a", 1, models[0])
        await pushed("b", 1, models[1])
        await pushed("a", 2, models[2])
        await pushed("b", 1, models[1])


async def test_a_pushed_version_without_room_is_tried_again(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer has done its part, and waits for it to be served."""
    without_room = [True, True]
    stage = EmbeddedEngine.stage

    async def crowded(engine: EmbeddedEngine, tensors: Any) -> Any:
        if without_room:
            without_room.pop()
            raise QuartetError("OVERLOADED", "no room now")
        return await stage(engine, tensors)

    monkeypatch.setattr(EmbeddedEngine, "stage", crowded)
    async with serving(model_folder, accept_push=True) as replica:
        sound = await push_version(replica.channel, "mine", 1, weights_of(make_model(1)))
        assert not (await replica.serves(sound.manifest.digest)).update_refused
    assert not without_room
