"""Room for adapters: whose is taken, and what is said where there is none. Over loopback gRPC."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from quartet.errors import from_rpc
from quartet.v1 import inference_service_pb2 as pb
from quartet.weights import fetch
from quartet.weights.store import WeightStore

from .adapters import random_adapter
from .inference_replica import Make, publish, serving
from .test_inference_adapters import put, request, served


async def test_the_oldest_adapter_whose_run_is_over_makes_room(model_folder: Path, make_model: Make) -> None:
    """adapters.py 1."""
    base, store = make_model(0), WeightStore(4)
    for number, run_id in enumerate("abcd"):
        put(store, run_id, 0, random_adapter(base, number))
    store.open_run("a")
    server = await publish(store)
    settings = {"weights_address": server.address, "run_id": "a", "adapters": {"max_count": 3}}
    async with serving(model_folder, shared_memory=False, **settings) as replica:
        await replica.until(lambda model: served(model) == {"a": 0})
        for run_id in "bc":
            await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id=run_id))
        store.close_run("c")
        store.close_run("b")
        answer, _ = await replica.generate(request("b"))
        assert answer, "it outlives its run while there is room"
        await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="d"))
        assert served(await replica.model()) == {"a": 0, "c": 0, "d": 0}
        store.open_run("c")  # it is restored, and has published nothing yet
        store.close_run("d")
        put(store, "b", 1, random_adapter(base, 1))
        await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="b"))
        assert served(await replica.model()) == {"a": 0, "b": 1, "c": 0}
    await server.stop(0)


async def test_an_adapter_whose_run_ended_behind_a_cut_makes_room_once_the_trainer_is_heard_again(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """adapters.py 1: nobody tells the replica, it asks when it needs the place."""
    monkeypatch.setattr(fetch, "BACKOFF_SECONDS", (0.1, 0.2))
    base, store = make_model(0), WeightStore(4)
    for number, run_id in enumerate("abc"):
        put(store, run_id, 0, random_adapter(base, number))
    store.open_run("a")
    server = await publish(store)
    settings = {"weights_address": server.address, "run_id": "a", "adapters": {"max_count": 2}}
    async with serving(model_folder, shared_memory=False, **settings) as replica:
        await replica.until(lambda model: served(model) == {"a": 0})
        await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="b"))
        await server.stop(0)
        store.close_run("b")
        answer, _ = await replica.generate(request("b"))
        assert answer, "it is not known here that the run has ended"
        server = await publish(store, server.address)
        await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="c"))
        assert served(await replica.model()) == {"a": 0, "c": 0}
    await server.stop(0)


async def test_a_replica_without_room_says_which_of_its_keys_to_raise(
    model_folder: Path, make_model: Make
) -> None:
    base, store = make_model(0), WeightStore(4)
    for number, run_id in enumerate("ab"):
        put(store, run_id, 0, random_adapter(base, number))
    store.open_run("a")
    server = await publish(store)
    settings = {"weights_address": server.address, "shared_memory": False, "run_id": "a"}
    nbytes = sum(len(one.data) for one in random_adapter(base, 0).tensors.values())
    for bounds, said in (
        ({"max_count": 1}, "adapters.max_count = 1 of this replica allows; raise that"),
        ({"max_bytes": nbytes}, f"more than adapters.max_bytes = {nbytes} of this replica; raise that"),
    ):
        async with serving(model_folder, adapters=bounds, **settings) as replica:
            await replica.until(lambda model: served(model) == {"a": 0})
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="b"))
            error = from_rpc(refused.value)
            assert error.reason == "OVERLOADED" and said in error.message
    await server.stop(0)
