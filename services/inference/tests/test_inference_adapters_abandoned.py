"""LoadAdapter and UnloadAdapter whose callers leave half-way: it is done whole (adapters.py 5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from quartet.inference import INFERENCE
from quartet.v1 import inference_service_pb2 as pb
from quartet.weights.store import WeightStore
from quartet_inference.embedded.engine import EmbeddedEngine

from .adapters import random_adapter
from .engine_calls import until
from .inference_replica import Make, Replica, publish, serving

LOAD = pb.LoadAdapterRequest(run_id="b")


def put(store: WeightStore, version: int, base: Any) -> None:
    adapter = random_adapter(base, version)
    store.publish("b", version, adapter.tensors, adapter_config=adapter.config)


def served(model: Any) -> dict[str, int]:
    return {one.run_id: one.policy_version for one in model.adapters}


@asynccontextmanager
async def following(folder: Path, store: WeightStore) -> AsyncIterator[Replica]:
    """A replica that follows a run without versions, beside which another one has an adapter."""
    store.open_run("a")
    server = await publish(store)
    settings = {"shared_memory": False, "run_id": "a", "adapters": {"on_demand": False}}
    try:
        async with serving(folder, weights_address=server.address, **settings) as replica:
            yield replica
    finally:
        await server.stop(0)


@dataclass
class Held:
    """Something that is held up half-way."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    def engine(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        """What the engine is asked for; as in an engine of other processes, it is done whoever has left."""
        at_once = getattr(EmbeddedEngine, method)

        async def work(engine: Any, *arguments: Any) -> None:
            self.asked.set()
            await self.go_on.wait()
            await at_once(engine, *arguments)

        async def later(engine: Any, *arguments: Any) -> None:
            await asyncio.shield(asyncio.create_task(work(engine, *arguments)))

        monkeypatch.setattr(EmbeddedEngine, method, later)

    async def abandon(self, call: Any) -> None:
        """The caller leaves meanwhile."""
        answer = asyncio.ensure_future(call)
        await asyncio.wait_for(self.asked.wait(), 10)
        call.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        await asyncio.sleep(0.1)  # the service has been told
        self.go_on.set()


async def test_an_adapter_that_was_being_taken_is_followed(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 9: served and never replaced, it would look healthy for ever."""
    base, store = make_model(0), WeightStore(4)
    put(store, 0, base)
    async with following(model_folder, store) as replica:
        held = Held()
        held.engine(monkeypatch, "swap_adapter")
        await held.abandon(replica.stub.LoadAdapter(LOAD))
        await replica.until(lambda model: served(model) == {"b": 0})
        put(store, 1, base)
        await replica.until(lambda model: served(model) == {"b": 1})


async def test_the_own_model_that_was_being_served_makes_the_replica_ready(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore(4)
    put(store, 0, make_model(0))
    async with following(model_folder, store) as replica:
        held = Held()
        held.engine(monkeypatch, "swap")
        await held.abandon(replica.stub.LoadAdapter(LOAD))
        await until(lambda: replica.health.why_not(INFERENCE) == "")


async def test_an_adapter_that_was_being_unloaded_is_served_no_more(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its follower has ended already: nothing else would take it away, or bring a newer one."""
    store, held = WeightStore(4), Held()
    put(store, 0, make_model(0))

    async def ends_slowly(_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            held.asked.set()
            await held.go_on.wait()

    async with following(model_folder, store) as replica:
        monkeypatch.setattr("quartet_inference.adapters.Follower.run", ends_slowly)
        await replica.stub.LoadAdapter(LOAD)
        await held.abandon(replica.stub.UnloadAdapter(pb.UnloadAdapterRequest(run_id="b")))
        await replica.until(lambda model: served(model) == {})


async def test_an_adapter_that_is_unloaded_while_it_is_taken_does_not_come_back(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lost patience with LoadAdapter and unloads has the last word."""
    base, store = make_model(0), WeightStore(4)
    put(store, 0, base)
    async with following(model_folder, store) as replica:
        held = Held()
        held.engine(monkeypatch, "swap_adapter")
        await held.abandon(replica.stub.LoadAdapter(LOAD))
        await replica.stub.UnloadAdapter(pb.UnloadAdapterRequest(run_id="b"))
        put(store, 1, base)
        await asyncio.sleep(0.3)
        assert served(await replica.model()) == {}
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "follow-adapter-b"]
