"""Adapters whose canary dies: nobody is told that they are served, and everybody why they are not."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from quartet.errors import QuartetError, from_rpc
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import weights_pb2
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet_inference import adapters, lookup
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.verdicts import MAX_DEAD, REFUSED_SECONDS, Verdicts

from .adapters import Adapter, canary_of, random_adapter
from .inference_replica import Make, Replica, publish, serving
from .test_inference_adapters import request


def untrained(model: Any) -> Adapter:
    """As every adapter begins: its second matrices are zero, so it changes nothing."""
    made = random_adapter(model, 1)
    tensors = {
        name: Tensor(one.dtype, one.shape, bytes(len(one.data))) if ".lora_B." in name else one
        for name, one in made.tensors.items()
    }
    return Adapter(made.config, tensors, model)


def put(
    store: WeightStore,
    run_id: str,
    version: int,
    adapter: Adapter,
    computed_by: Any = None,
    base: str = "models/sft",
) -> None:
    config = json.dumps({**json.loads(adapter.config), "base_model_name_or_path": base})
    canary = canary_of(computed_by or adapter.merged)
    store.publish(run_id, version, adapter.tensors, adapter_config=config, canary=canary)


async def refusal(replica: Replica, run_id: str) -> QuartetError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id=run_id), timeout=10)
    return from_rpc(refused.value)


def served(model: pb.GetModelResponse) -> dict[str, int]:
    return {one.run_id: one.policy_version for one in model.adapters}


@contextlib.asynccontextmanager
async def follower_of_another(model_folder: Path, base: Any) -> AsyncIterator[tuple[Replica, WeightStore]]:
    """A replica that follows a run without versions, beside run "r", which has an adapter upon the base; and
    the store of both."""
    store = WeightStore(4)
    put(store, "r", 0, untrained(base))
    store.open_run("elsewhere")
    server = await publish(store)
    settings = {"shared_memory": False, "run_id": "elsewhere", "adapters": {"on_demand": False}}
    async with serving(model_folder, weights_address=server.address, **settings) as replica:
        yield replica, store
    await server.stop(0)


async def test_an_adapter_of_another_base_is_never_told_as_served(
    model_folder: Path, make_model: Make
) -> None:
    """verdicts.py 1, 2: same shape, other weights, as a checkpoint of a fine-tuning has them."""
    async with follower_of_another(model_folder, make_model(7)) as (replica, store):
        told: list[dict[str, int]] = []
        for _ in range(3):
            asked = asyncio.create_task(refusal(replica, "r"))
            while not asked.done():
                told.append(served(await replica.model()))
            assert (await asked).reason == "NOT_READY"
            for said in ((await asked).message, (await replica.model()).refused_adapters[0].why):
                cause = f"base ({str(model_folder)!r}) is another model than the run's ('models/sft'); start"
                assert "of its canary are" in said and cause in said
        assert not any(told), "not for the moment either in which its canary is scored"
        assert [one.run_id for one in (await replica.model()).refused_adapters] == ["r"]

        put(store, "r", 1, random_adapter(make_model(0), 1))
        loaded = await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="r"), timeout=10)
        assert loaded.version == 1
        model = await replica.model()
        assert served(model) == {"r": 1} and not model.refused_adapters


async def test_an_adapter_of_another_base_answers_nobody_however_often_it_is_asked_for(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """canary.py 4: each request has it loaded again, and what it computes is no version's."""
    monkeypatch.setattr(lookup, "LOOK_SECONDS", 0.0)
    store = WeightStore(4)
    put(store, "r", 0, untrained(make_model(7)))
    store.open_run("elsewhere")
    server = await publish(store)
    settings = {"weights_address": server.address, "shared_memory": False, "run_id": "elsewhere"}
    async with serving(model_folder, **settings) as replica:
        for _ in range(5):
            asked = [replica.refusal(request("r", 2)) for _ in range(3)]
            for error in await asyncio.gather(*asked):
                assert error.reason == "NOT_READY" and "is another model than the run's" in error.message
        assert (await replica.model()).tokens_sampled == 0
        put(store, "r", 1, random_adapter(make_model(0), 1))
        async with asyncio.timeout(60):
            while not served(await replica.model()):
                with contextlib.suppress(QuartetError):
                    await replica.generate(request("r", 2))
        assert (await replica.generate(request("r", 2)))[1]
    await server.stop(0)


async def test_what_waits_for_an_adapter_waits_for_its_canary(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """canary.py 4, answering.py 2"""
    score, goes_on = EmbeddedEngine.score, asyncio.Event()

    async def late(self: Any, request: Any) -> Any:
        if request.run_id == "r":
            await goes_on.wait()
        return await score(self, request)

    monkeypatch.setattr(EmbeddedEngine, "score", late)
    store = WeightStore(4)
    put(store, "r", 0, random_adapter(make_model(0), 1))
    server = await publish(store)
    async with serving(model_folder, weights_address=server.address, shared_memory=False) as replica:
        asked = asyncio.create_task(replica.generate(request("r", 4)))
        await asyncio.sleep(0.5)
        assert not asked.done() and (await replica.model()).tokens_sampled == 0
        sample = {"token_ids": [1, 2], "spans": [{"start": 1, "length": 1}]}
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await replica.stub.Score(pb.ScoreRequest(run_id="r", samples=[sample]), timeout=10)
        assert from_rpc(refused.value).reason == "NOT_READY" and "canary" in str(refused.value.details())
        goes_on.set()
        assert (await asked)[1]
    await server.stop(0)


def as_published_in_bfloat16(adapter: Adapter) -> Adapter:
    """Upon a base that the trainer rounds for its canary."""
    tensors = {}
    for name, one in adapter.tensors.items():
        values = torch.frombuffer(bytearray(one.data), dtype=torch.float32).bfloat16()
        tensors[name] = Tensor("BF16", one.shape, values.view(torch.uint8).numpy().tobytes())
    return Adapter(adapter.config, tensors, copy.deepcopy(adapter.merged).bfloat16().float())


async def test_a_base_that_was_rounded_is_not_another_model(model_folder: Path, make_model: Make) -> None:
    """verdicts.py 2: one folder, rounded by the trainer and not by the replica."""
    narrow = as_published_in_bfloat16(untrained(make_model(0)))
    async with follower_of_another(model_folder, make_model(0)) as (replica, store):
        put(store, "r", 1, narrow, base=str(model_folder))
        why = (await refusal(replica, "r")).message
        assert "another model" not in why and f"({str(model_folder)!r}) was rounded to bfloat16" in why
        remedies = (
            'is float32; give the run served_dtype = "float32", or the replica embedded.dtype = "bfloat16"'
        )
        assert why.endswith(remedies)
    both = {"dtype": "bfloat16", "kv_cache_bytes": 1 << 24, "max_num_seqs": 8}
    store = WeightStore(4)
    put(store, "r", 1, narrow, base=str(model_folder))
    server = await publish(store)
    async with serving(
        model_folder, weights_address=server.address, shared_memory=False, embedded=both
    ) as replica:
        await replica.until(lambda model: served(model) == {"r": 1})
        # Wider than the replica's is no cause.
        put(store, "wide", 1, untrained(make_model(7)), base="~no-such-user/sft")
        why = (await refusal(replica, "wide")).message
        assert "is another model than the run's ('~no-such-user/sft'); start" in why
    await server.stop(0)


async def test_other_weights_in_a_folder_of_the_same_name_are_told_as_that(
    model_folder: Path, make_model: Make
) -> None:
    """verdicts.py 2"""
    async with follower_of_another(model_folder, make_model(0)) as (replica, store):
        put(store, "r", 1, untrained(make_model(7)), base=str(model_folder))
        why = (await refusal(replica, "r")).message
        assert f"read from {str(model_folder)!r} as the run's, has other weights than that; start" in why


async def test_an_adapter_that_dies_later_is_told_until_it_is_unloaded(
    model_folder: Path, make_model: Make
) -> None:
    base, store = make_model(0), WeightStore(4)
    put(store, "r", 0, untrained(base))
    server = await publish(store)
    settings = {"shared_memory": False, "adapters": {"on_demand": False}}
    async with serving(model_folder, weights_address=server.address, **settings) as replica:
        await replica.until(lambda model: served(model) == {"r": 0})
        put(store, "r", 1, random_adapter(base, 1), computed_by=random_adapter(base, 2).merged)
        model = await replica.until(lambda model: bool(model.refused_adapters))
        why = model.refused_adapters[0].why
        assert served(model) == {} and "not those of version 1" in why
        assert "than the run's ('models/sft'), or what is in the engine is damaged; start" in why
        await replica.stub.UnloadAdapter(pb.UnloadAdapterRequest(run_id="r"))
        assert not (await replica.model()).refused_adapters
    await server.stop(0)


async def test_load_adapter_waits_for_the_canary_so_long(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "CANARY_SECONDS", 0.2)
    async with follower_of_another(model_folder, make_model(0)) as (replica, _):
        await replica.stub.Pause(pb.PauseRequest())
        refused = await refusal(replica, "r")
        assert refused.reason == "DEADLINE" and "paused" in refused.message
        assert served(await replica.model()) == {}
        await replica.stub.Resume(pb.ResumeRequest())
        await replica.until(lambda model: served(model) == {"r": 0})


async def test_an_adapter_whose_canary_cannot_be_scored_is_not_told_as_loaded(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verdicts.py 1"""
    score = EmbeddedEngine.score

    async def no_room(self: Any, request: Any) -> Any:
        if request.run_id == "r":
            raise QuartetError("OVERLOADED", "the device has no room")
        return await score(self, request)

    monkeypatch.setattr(EmbeddedEngine, "score", no_room)
    async with follower_of_another(model_folder, make_model(0)) as (replica, _):
        refused = await refusal(replica, "r")
        assert refused.reason == "DEADLINE" and "could not be scored" in refused.message
        assert served(await replica.model()) == {}
        monkeypatch.undo()
        await replica.stub.UnloadAdapter(pb.UnloadAdapterRequest(run_id="r"))
        await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="r"), timeout=10)
        assert served(await replica.model()) == {"r": 0}


async def test_an_adapter_of_another_vocabulary_is_refused_before_it_is_served(
    model_folder: Path, make_model: Make
) -> None:
    base, store = make_model(0), WeightStore(4)
    canary = weights_pb2.Canary(token_ids=[1, 70_000], logprobs=[-1.0])
    adapter = untrained(base)
    store.publish("r", 0, adapter.tensors, adapter_config=adapter.config, canary=canary)
    server = await publish(store)
    async with serving(model_folder, weights_address=server.address, shared_memory=False) as replica:
        refused = await refusal(replica, "r")
        assert refused.reason == "INVALID_REQUEST"
        assert "has token 70000" in refused.message and "of another model" in refused.message
    await server.stop(0)


def test_the_dead_are_bounded() -> None:
    verdicts = Verdicts()
    for number in range(MAX_DEAD + 3):
        verdicts.died(f"run {number}", "why")
    assert len(verdicts.dead) == MAX_DEAD and "run 2" not in verdicts.dead


def test_what_could_not_be_loaded_is_told_for_a_while_until_one_lives_or_it_is_unloaded() -> None:
    """verdicts.py 3"""
    now = [0.0]
    verdicts = Verdicts(lambda: now[0])
    for number in range(MAX_DEAD + 1):
        verdicts.refused(f"run {number}", "no room")
    assert len(verdicts.all_behind) == MAX_DEAD and not verdicts.behind("run 0")
    assert verdicts.behind("run 1") == "no room" and not verdicts.living("run 1")
    verdicts.ended("run 1")  # another attempt begins
    assert verdicts.behind("run 1") == "no room"
    verdicts.lives("run 1")
    verdicts.forget("run 2")
    assert not verdicts.behind("run 1") and not verdicts.behind("run 2") and verdicts.behind("run 3")
    now[0] = REFUSED_SECONDS / 2
    verdicts.refused("run 4", "no room")
    now[0] = REFUSED_SECONDS
    assert [one.run_id for one in verdicts.all_behind] == ["run 4"]
