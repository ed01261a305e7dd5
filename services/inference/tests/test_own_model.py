"""A replica that goes from a run of whole models to runs of adapters, and back, on one deployment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from quartet.errors import QuartetError, from_rpc
from quartet.v1 import inference_service_pb2 as pb
from quartet.weights.store import WeightStore
from quartet_inference.embedded import model
from quartet_inference.engine import ServedWeights
from quartet_inference.own_model import OwnModel

from .adapters import random_adapter
from .engine_calls import running, update
from .inference_replica import Make, publish, serving
from .random_models import weights_of
from .test_inference_adapters import difference, put, request, served

SETTINGS = {"shared_memory": False}


async def refusal(replica: Any, run_id: str) -> QuartetError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id=run_id), timeout=10)
    return from_rpc(refused.value)


@pytest.mark.parametrize("whole_is_closed", [True, False])
async def test_a_run_of_adapters_follows_a_run_of_whole_models(
    model_folder: Path, make_model: Make, whole_is_closed: bool
) -> None:
    """adapters.py, 2: upon the folder's model, to the bit, and not upon what the run before has left."""
    base, store, trained = make_model(0), WeightStore(4), make_model(1)
    store.publish("whole", 3, weights_of(trained))
    server = await publish(store)
    async with serving(model_folder, weights_address=server.address, **SETTINGS) as replica:
        await replica.until_version("whole", 3)
        if whole_is_closed:
            store.close_run("whole")
        store.open_run("adapted")
        adapters = {version: random_adapter(base, version) for version in range(2)}
        for version, adapter in adapters.items():
            put(store, "adapted", version, adapter)
            loaded = await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="adapted"))
            assert loaded.version == version
        now = await replica.model()
        assert (now.run_id, now.policy_version, served(now)) == ("", 0, {"adapted": 1})
        deltas, _ = await replica.generate(request("adapted"))
        assert difference(deltas, {1: adapters[1].merged}) <= 2e-5
        plain, _ = await replica.generate(request(""))
        assert difference(plain, {0: base}) <= 2e-5
        gone = await replica.refused_in_the_end(request("whole"))
        assert gone.reason == "RUN_NOT_SERVED"
    await server.stop(0)


async def test_adapters_are_refused_at_once_while_whole_models_are_followed(
    model_folder: Path, make_model: Make
) -> None:
    base, store = make_model(0), WeightStore(4)
    first, second = random_adapter(base, 1), random_adapter(base, 2)
    put(store, "adapted", 0, first)
    server = await publish(store)
    async with serving(model_folder, weights_address=server.address, **SETTINGS) as replica:
        await replica.until(lambda model: served(model) == {"adapted": 0})
        store.publish("whole", 0, weights_of(make_model(1)))
        await replica.until_version("whole", 0)
        assert served(await replica.model()) == {}
        refused = await refusal(replica, "adapted")
        assert refused.reason == "INVALID_REQUEST" and "version 0 of run whole" in refused.message
        put(store, "adapted", 1, second)
        store.publish("whole", 1, weights_of(make_model(2)))
        await replica.until_version("whole", 1)
        # The run before is the one that is followed again: what was dropped comes back by itself.
        store.close_run("whole")
        await replica.until(lambda model: served(model) == {"adapted": 1})
        deltas, _ = await replica.generate(request("adapted"))
        assert difference(deltas, {1: second.merged}) <= 2e-5
        put(store, "adapted", 2, first)
        await replica.until(lambda model: served(model) == {"adapted": 2})
    await server.stop(0)


async def test_a_replica_for_one_run_of_whole_models_refuses_adapters_when_that_has_ended(
    model_folder: Path, make_model: Make
) -> None:
    base, store = make_model(0), WeightStore(4)
    store.publish("whole", 0, weights_of(make_model(1)))
    put(store, "adapted", 0, random_adapter(base, 1))
    server = await publish(store)
    settings = {"weights_address": server.address, "run_id": "whole", **SETTINGS}
    async with serving(model_folder, **settings) as replica:
        await replica.until_version("whole", 0)
        assert (await refusal(replica, "adapted")).reason == "INVALID_REQUEST"
        store.close_run("whole")
        assert (await refusal(replica, "adapted")).reason == "INVALID_REQUEST"
        await replica.until_version("whole", 0)
    await server.stop(0)


async def test_another_models_run_that_came_last_keeps_nobody_from_being_served(
    model_folder: Path, make_model: Make
) -> None:
    base, store = make_model(0), WeightStore(4)
    put(store, "ours", 0, random_adapter(base, 1))
    put(store, "theirs", 0, random_adapter(make_model(0, hidden_size=32), 1))
    server = await publish(store)
    async with serving(model_folder, weights_address=server.address, **SETTINGS) as replica:
        await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="ours"))
        put(store, "ours", 1, random_adapter(base, 2))
        await replica.until(lambda model: served(model) == {"ours": 1})
    await server.stop(0)


async def test_a_folder_that_has_changed_meanwhile_is_not_served(
    model_folder: Path, make_model: Make, tmp_path: Path
) -> None:
    """invariant 3: what the run was created from is what its adapters are served upon."""
    folder, trained = tmp_path / "model", ServedWeights("whole", 0, b"trained")
    shutil.copytree(model_folder, folder)
    async with running(make_model(0)) as engine:
        own = OwnModel(engine, folder)
        await update(engine, make_model(1), trained)
        make_model(2).save_pretrained(folder)
        with pytest.raises(QuartetError, match="have changed") as changed:
            await own.serve()
        assert changed.value.reason == "CHECKSUM_MISMATCH"
        os.truncate(folder / "model.safetensors", 100)
        with pytest.raises(QuartetError, match="can be read no more") as damaged:
            await own.serve()
        assert damaged.value.reason == "CHECKSUM_MISMATCH", "no fault, which would end the replica"
        (folder / "model.safetensors").unlink()
        with pytest.raises(QuartetError, match="has no weights"):
            await own.serve()
        assert engine.info().served == trained
        make_model(0).save_pretrained(folder)
        await own.serve()
        assert engine.info().served == ServedWeights("", 0, engine.base_digest())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_is_read_again_as_it_was_loaded(
    model_folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the engine's dtype, and the process keeps its own meanwhile: the engine computes."""
    loaded = model.ModelWeights(model.load(model_folder, dtype, weights_follow=False)).tensors()
    defaults: list[torch.dtype] = []
    monkeypatch.setattr(torch, "set_default_dtype", defaults.append)
    assert model.read(model_folder, dtype) == loaded
    assert set(defaults) == {torch.float32}
