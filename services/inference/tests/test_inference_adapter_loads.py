"""Adapters on their way: looked for when a request names them, loaded once however often it is asked, to the
end also where nobody waits any more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError, from_rpc
from quartet.inference import INFERENCE
from quartet.v1 import inference_service_pb2 as pb
from quartet.weights.store import WeightStore
from quartet_inference import adapter_base, adapters, answering, lookup
from quartet_inference.engine import ServedWeights
from quartet_inference.loads import Loads

from .adapters import put, random_adapter, request, served
from .engine_calls import until
from .inference_replica import Make, publish, serving


async def test_a_run_that_is_loaded_twice_at_once_is_followed_once(
    model_folder: Path, make_model: Make
) -> None:
    base, store = make_model(0), WeightStore(4)
    put(store, "r", 0, random_adapter(base, 1))
    put(store, "a", 3, random_adapter(base, 2))
    server = await publish(store)
    settings = {"shared_memory": False, "run_id": "a", "adapters": {"on_demand": False}}
    async with serving(model_folder, weights_address=server.address, **settings) as replica:
        await replica.until(lambda model: served(model) == {"a": 3})
        load = pb.LoadAdapterRequest(run_id="r")
        await asyncio.gather(*(replica.stub.LoadAdapter(load) for _ in range(4)))
        following = [task for task in asyncio.all_tasks() if task.get_name() == "follow-adapter-r"]
        assert len(following) == 1
        await replica.stub.UnloadAdapter(pb.UnloadAdapterRequest(run_id="r"))
        assert following[0].done()
    await server.stop(0)


async def test_a_request_makes_the_replica_look_for_its_adapter(model_folder: Path, make_model: Make) -> None:
    base, store = make_model(0), WeightStore(4)
    put(store, "a", 0, random_adapter(base, 1))
    put(store, "b", 2, random_adapter(base, 2))
    store.open_run("a")
    server = await publish(store)
    async with serving(model_folder, weights_address=server.address, shared_memory=False) as replica:
        await replica.until(lambda model: served(model) == {"a": 0})
        deltas, _ = await replica.generate(request("b"))
        assert {span.policy_version for delta in deltas for span in delta.spans} == {2}
        unknown = await replica.refused_in_the_end(request("nobody"))
        assert unknown.reason == "RUN_NOT_SERVED"
    await server.stop(0)


@pytest.mark.parametrize("on_demand", [True, False])
async def test_a_run_that_the_trainer_does_not_know_is_refused_soon_and_one_that_it_knows_is_waited_for(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch, on_demand: bool
) -> None:
    """answering.py 2: with what is served; a run that is made within UNKNOWN_SECONDS is answered."""
    base, store = make_model(0), WeightStore(4)
    put(store, "a", 0, random_adapter(base, 2))
    store.open_run("a")
    monkeypatch.setattr(lookup, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(answering, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(answering, "UNKNOWN_SECONDS", 1.0)
    server = await publish(store)
    settings = {"shared_memory": False, "adapters": {"on_demand": on_demand}}
    async with serving(model_folder, weights_address=server.address, **settings) as replica:
        await replica.until(lambda model: served(model) == {"a": 0})
        started = asyncio.get_running_loop().time()
        soon = asyncio.create_task(replica.generate(request("c"), timeout_s=60))
        unknown = asyncio.create_task(replica.refusal(request("nobody"), timeout_s=60))
        store.open_run("later")
        late = asyncio.create_task(replica.generate(request("later"), timeout_s=60))
        await asyncio.sleep(0.5)
        put(store, "c", 0, random_adapter(base, 1))  # no run of this name was there before
        refusal = await unknown
        assert 1.0 <= asyncio.get_running_loop().time() - started < 30
        assert refusal.reason == "RUN_NOT_SERVED" and refusal.metadata["want"] == "nobody"
        assert "has no run of this name" in refusal.message
        assert "what is served: the base model, the adapter of run a" in refusal.message
        assert not late.done()  # it is open, and may publish at any time
        for run_id in [] if on_demand else ["c", "later"]:
            put(store, run_id, 1, random_adapter(base, 2))
            await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id=run_id))
        if on_demand:
            put(store, "later", 0, random_adapter(base, 2))
        assert (await soon)[1] and (await late)[1]
    await server.stop(0)


async def test_unknown_runs_are_looked_for_seldom_and_few_at_once() -> None:
    """Invariant 8, lookup.py 1 and 2: whoever names runs that do not exist does not flood the trainer."""
    asked: list[str] = []
    answer = asyncio.Event()

    async def load(run_id: str) -> None:
        asked.append(run_id)
        await answer.wait()

    looking = lookup.Lookup(load, lambda: None)
    for number in range(1000):
        looking.begin(f"run {number % 500}")
        await asyncio.sleep(0)
    assert len(asked) == looking.under_way == lookup.MAX_LOOKS
    answer.set()
    await until(lambda: looking.under_way == 0)
    looking.begin("run 0")
    looking.begin("another")
    looking.begin("another")
    await until(lambda: looking.under_way == 0)
    assert asked[lookup.MAX_LOOKS :] == ["another"]
    await looking.close()


async def test_a_run_is_looked_for_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """lookup.py 1: an adapter that takes its time to come is not fetched again and again beside itself."""
    monkeypatch.setattr(lookup, "LOOK_SECONDS", 0.0)
    asked: list[str] = []
    came = asyncio.Event()

    async def load(run_id: str) -> None:
        asked.append(run_id)
        await came.wait()

    looking = lookup.Lookup(load, lambda: None)
    for run_id in "aab":
        looking.begin(run_id)
        await asyncio.sleep(0)
    assert asked == ["a", "b"]
    came.set()
    await until(lambda: looking.under_way == 0)
    looking.begin("a")
    await until(lambda: looking.under_way == 0)
    assert asked == ["a", "b", "a"]
    await looking.close()


async def test_a_load_that_failed_fails_nobody_who_joined_it() -> None:
    """loads.py 1: what it met may be over by now, as an adapter that was unloaded meanwhile."""
    loads, left, begun = Loads(), [QuartetError("NOT_READY", "unloaded"), 1, 2], list[Any]()

    async def load() -> ServedWeights:
        begun.append(left.pop(0))
        await asyncio.sleep(0)
        if isinstance(begun[-1], QuartetError):
            raise begun[-1]
        return ServedWeights("a", begun[-1], b"")

    asked = [asyncio.create_task(loads.reach("a", version, load)) for version in (0, 1, 2, 1)]
    refused, *came = await asyncio.gather(*asked, return_exceptions=True)
    assert refused is begun[0] and [one.version for one in came] == [1, 2, 1]
    await loads.close()


async def test_an_adapter_that_comes_more_slowly_than_its_caller_waits_is_loaded(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """loads.py 1 and 2: the orchestrator waits a minute, and asks again; no fetch begins anew with that.

    loads.py 3: one that is unloaded while it comes is not served once it has come.
    """
    base, store = make_model(0), WeightStore(4)
    put(store, "b", 0, random_adapter(base, 1))
    store.open_run("a")
    server = await publish(store)
    fetch, came, fetched = adapters.fetch_version, asyncio.Event(), list[str]()

    async def slow(channel: Any, run_id: str, *told: Any) -> Any:
        fetched.append(run_id)
        await came.wait()
        return await fetch(channel, run_id, *told)

    monkeypatch.setattr(adapters, "fetch_version", slow)
    settings = {"shared_memory": False, "run_id": "a", "adapters": {"on_demand": False}}
    async with serving(model_folder, weights_address=server.address, **settings) as replica:
        asked = pb.LoadAdapterRequest(run_id="b")
        unloaded = [replica.stub.LoadAdapter(asked, timeout=20) for _ in range(2)]
        await until(lambda: fetched)
        await replica.stub.UnloadAdapter(pb.UnloadAdapterRequest(run_id="b"))
        for refused in await asyncio.gather(*unloaded, return_exceptions=True):
            assert isinstance(refused, grpc.RpcError) and from_rpc(refused).reason == "NOT_READY"
        fetched.clear()
        first = replica.stub.LoadAdapter(asked, timeout=60)
        await until(lambda: fetched)
        with pytest.raises(grpc.RpcError):
            await replica.stub.LoadAdapter(asked, timeout=0.2)
        first.cancel()
        again = replica.stub.LoadAdapter(asked, timeout=60)
        assert not served(await replica.model())
        came.set()
        assert (await again).version == 0 and fetched == ["b"]
    await server.stop(0)


async def test_two_first_adapters_are_loaded_at_once(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """adapter_base.py 1: one makes the replica serve its own model; the other finds it served then."""
    base, store = make_model(0), WeightStore(4)
    for run_id in "bc":
        put(store, run_id, 0, random_adapter(base, 1))
    store.open_run("a")
    server = await publish(store)
    get_manifest = adapter_base.get_manifest
    looks: list[str] = []

    async def looked(channel: Any, run_id: str) -> Any:
        late = run_id in looks
        looks.append(run_id)
        try:
            return await get_manifest(channel, run_id)
        finally:
            if run_id == "a":
                both, serves = lambda: looks.count("a") == 2, lambda: not replica.health.why_not(INFERENCE)
                await until(serves if late else both)

    monkeypatch.setattr(adapter_base, "get_manifest", looked)
    settings = {"shared_memory": False, "run_id": "a", "adapters": {"on_demand": False}}
    async with serving(model_folder, weights_address=server.address, **settings) as replica:
        loads = [replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id=run_id)) for run_id in "bc"]
        assert [answer.version for answer in await asyncio.gather(*loads)] == [0, 0]
        assert served(await replica.model()) == {"b": 0, "c": 0} and looks.count("a") == 2
    await server.stop(0)
