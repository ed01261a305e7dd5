"""Adapters over loopback gRPC: followed by run, replaced in flight, loaded, unloaded, asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from quartet.errors import QuartetError, from_rpc
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import rollout_pb2
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor

from .adapters import PROMPT, canary_of, put, random_adapter, request, served
from .engine_calls import until
from .inference_replica import Make, publish, serving
from .random_models import weights_of


def difference(deltas: list[Any], models: dict[int, Any]) -> float:
    """The largest |service - plain forward| of the version stamped on each token."""
    ids = [token for delta in deltas for token in delta.token_ids]
    logprobs = [value for delta in deltas for value in delta.logprobs]
    versions = [span.policy_version for delta in deltas for span in delta.spans for _ in range(span.length)]
    worst = 0.0
    for version in set(versions):
        with torch.no_grad():
            logits = models[version](torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
        plain = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        mine = torch.tensor(versions) == version
        worst = max(worst, float((plain - torch.tensor(logprobs))[mine].abs().max()))
    return worst


async def test_a_followed_run_that_publishes_adapters_is_served_upon_the_folder(
    model_folder: Path, make_model: Make
) -> None:
    base, store = make_model(0), WeightStore(4)
    adapters = {version: random_adapter(base, version) for version in range(3)}
    ids: dict[int, int] = {}

    def publish_version(version: int) -> None:
        digest = put(store, "r", version, adapters[version]).digest
        ids[version] = int.from_bytes(digest[:8], "big")

    store.open_run("r")
    server = await publish(store)
    async with serving(model_folder, weights_address=server.address, shared_memory=False) as replica:
        assert (await replica.model()).out_of_service == ""
        publish_version(0)
        model = await replica.until(lambda model: served(model) == {"r": 0})
        assert (model.run_id, model.policy_version) == ("", 0)
        [running] = await replica.midway(lambda: [replica.generate(request("r", 200))])
        publish_version(1)
        await replica.until(lambda model: served(model) == {"r": 1})
        await replica.stub.Resume(pb.ResumeRequest())
        deltas, _ = await running
        stamped = {span.policy_version for delta in deltas for span in delta.spans}
        assert stamped == {0, 1}
        for delta in deltas:
            told = [(one.policy_version, one.weights_id) for one in delta.weights]
            assert told == [(span.policy_version, ids[span.policy_version]) for span in delta.spans]
        assert difference(deltas, {v: one.merged for v, one in adapters.items()}) <= 2e-5
        plain, _ = await replica.generate(request(""))
        assert difference(plain, {0: base}) <= 2e-5
        later = asyncio.create_task(replica.generate(request("r", min_policy_version=2)))
        publish_version(2)
        assert {span.policy_version for delta in (await later)[0] for span in delta.spans} == {2}
        sample = rollout_pb2.Sample(
            token_ids=PROMPT, spans=[rollout_pb2.PolicySpan(start=1, length=len(PROMPT) - 1)]
        )
        scores = await replica.stub.Score(pb.ScoreRequest(run_id="r", samples=[sample]))
        assert scores.samples[0].policy_version == 2
    await server.stop(0)


async def test_adapters_are_loaded_replaced_and_unloaded_while_others_are_served(
    model_folder: Path, make_model: Make
) -> None:
    base, store = make_model(0), WeightStore(4)
    first, second = random_adapter(base, 1), random_adapter(base, 2)
    put(store, "a", 3, first)
    put(store, "b", 5, second)
    store.open_run("a")  # the run that the replica follows by default
    settings = {"shared_memory": False, "adapters": {"on_demand": False}}
    server = await publish(store)
    async with serving(model_folder, weights_address=server.address, **settings) as replica:
        await replica.until(lambda model: served(model) == {"a": 3})
        missing = await replica.refused_in_the_end(request("b"))
        assert missing.reason == "RUN_NOT_SERVED"
        loaded = await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="b"))
        assert loaded.version == 5
        assert (await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="b"))).version == 5
        answers = await asyncio.gather(*(replica.generate(request(run)) for run in ("a", "b", "", "b")))
        models = ({3: first.merged}, {5: second.merged}, {0: base}, {5: second.merged})
        for (deltas, _), model in zip(answers, models, strict=True):
            assert difference(deltas, model) <= 2e-5
        put(store, "b", 6, first)
        await replica.until(lambda model: served(model) == {"a": 3, "b": 6})
        put(store, "b", 7, second)
        assert (await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="b"))).version == 7
        running, other = await replica.midway(
            lambda: [replica.generate(request(run_id, 230)) for run_id in "ba"]
        )
        await replica.stub.UnloadAdapter(pb.UnloadAdapterRequest(run_id="b"))
        await replica.stub.UnloadAdapter(pb.UnloadAdapterRequest(run_id="b"))
        await replica.stub.Resume(pb.ResumeRequest())
        with pytest.raises(QuartetError) as gone:
            await running
        assert gone.value.reason == "RUN_NOT_SERVED"
        assert sum(len(delta.token_ids) for delta in (await other)[0]) == 230
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "follow-adapter-b"]
        put(store, "b", 8, first)
        put(store, "a", 4, second)
        await replica.until(lambda model: served(model) == {"a": 4})
    await server.stop(0)


async def test_what_runs_on_an_adapter_that_gives_no_numbers_is_told_that_it_is_dead(
    model_folder: Path, make_model: Make
) -> None:
    """canary.py 1: before its canary is scored, and before it is unloaded."""
    base, store = make_model(0), WeightStore(4)
    put(store, "a", 0, random_adapter(base, 1))
    broken = random_adapter(base, 2)
    for name, one in broken.tensors.items():
        broken.tensors[name] = Tensor(one.dtype, one.shape, b"\xff" * len(one.data))
    server = await publish(store)
    async with serving(model_folder, weights_address=server.address, shared_memory=False) as replica:
        await replica.until(lambda model: served(model) == {"a": 0})
        (running,) = await replica.midway(lambda: [replica.generate(request("a", 230))])
        updates = (await replica.model()).updates_applied
        put(store, "a", 1, broken)
        await replica.until(lambda model: model.updates_applied > updates)
        await replica.stub.Resume(pb.ResumeRequest())
        with pytest.raises(QuartetError) as failed:
            await running
        assert failed.value.reason == "NOT_READY" and "adapter unloaded: " in failed.value.message
        assert "version 1 give log-probabilities that are no numbers" in failed.value.message
    await server.stop(0)


async def test_load_adapter_refuses_by_reason(model_folder: Path, make_model: Make) -> None:
    base, store = make_model(0), WeightStore(4)
    store.publish("whole", 0, weights_of(base))
    put(store, "a", 0, random_adapter(base, 1))
    put(store, "b", 0, random_adapter(base, 2))
    put(store, "odd", 0, random_adapter(make_model(0, hidden_size=32), 1))
    store.open_run("a")
    server = await publish(store)

    async def refusal(replica: Any, run_id: str) -> QuartetError:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id=run_id))
        return from_rpc(refused.value)

    settings = {"weights_address": server.address, "shared_memory": False, "adapters": {"max_count": 1}}
    async with serving(model_folder, **settings) as replica:
        await replica.until(lambda model: served(model) == {"a": 0})
        assert (await refusal(replica, "")).reason == "INVALID_REQUEST"
        assert (await refusal(replica, "nobody")).reason == "RUN_UNKNOWN"
        assert "whole models" in (await refusal(replica, "whole")).message
        assert "the model needs" in (await refusal(replica, "odd")).message
        assert (await refusal(replica, "b")).reason == "OVERLOADED"
        assert served(await replica.model()) == {"a": 0}
    async with serving(model_folder) as replica:
        assert "follows no trainer" in (await refusal(replica, "a")).message
    await server.stop(0)


async def test_adapters_that_leave_with_their_base_are_followed_no_more(
    model_folder: Path, make_model: Make
) -> None:
    """Invariant 8: what is held of the runs of a replica that has met many."""
    store = WeightStore(4)
    put(store, "a", 0, random_adapter(make_model(0), 1))
    server = await publish(store)
    async with serving(model_folder, weights_address=server.address, shared_memory=False) as replica:
        await replica.until(lambda model: served(model) == {"a": 0})
        store.publish("whole", 0, weights_of(make_model(1)))
        await replica.until_version("whole", 0)
        await until(lambda: "follow-adapter-a" not in [task.get_name() for task in asyncio.all_tasks()])
    await server.stop(0)


@pytest.mark.parametrize("on_the_way", [False, True])
async def test_a_run_that_comes_back_with_whole_models_is_followed_as_that(
    model_folder: Path, make_model: Make, on_the_way: bool
) -> None:
    """adapters.py 2: it was deleted and begun anew under its name, and nobody unloaded what was here."""
    store = WeightStore(4)
    put(store, "a", 3, random_adapter(make_model(0), 1))
    server = await publish(store)
    settings = {"weights_address": server.address, "shared_memory": False}
    async with serving(model_folder, **settings) as replica:
        await replica.until(lambda model: served(model) == {"a": 3})
        if on_the_way:
            await server.stop(0)
        store.close_run("a")
        for version in range(2):
            store.publish("a", version, weights_of(make_model(1 + version)))
            if on_the_way and not version:
                server = await publish(store, server.address)
            model = await replica.until_version("a", version)
            assert served(model) == {} and not model.update_refusals
    await server.stop(0)


async def test_an_adapter_whose_canary_dies_is_unloaded_alone(model_folder: Path, make_model: Make) -> None:
    """invariant 3: an adapter in the engine that computes something else is not served as its version."""
    base, store = make_model(0), WeightStore(4)
    adapters = {version: random_adapter(base, version) for version in range(3)}
    put(store, "a", 0, adapters[0], canary_of(adapters[0].merged))
    server = await publish(store)
    async with serving(model_folder, weights_address=server.address, shared_memory=False) as replica:
        await replica.until(lambda model: served(model) == {"a": 0})
        put(store, "a", 1, adapters[1], canary_of(adapters[2].merged))
        await replica.until(lambda model: served(model) == {})
        assert (await replica.generate(request("")))[1]
        put(store, "a", 2, adapters[2], canary_of(adapters[2].merged))
        await replica.until(lambda model: served(model) == {"a": 2})
        await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "canary"))
        assert served(await replica.model()) == {"a": 2}
    await server.stop(0)


async def test_a_version_of_an_adapter_that_cannot_be_taken_is_told_until_one_is(
    model_folder: Path, make_model: Make
) -> None:
    """verdicts.py 3, for an adapter that the replica follows anyway, and for one that was loaded."""
    base, store = make_model(0), WeightStore(4)
    sound = {version: random_adapter(base, version) for version in range(3)}
    for run_id in ("b", "a"):
        put(store, run_id, 0, sound[0])
    unfit = dict(list(sound[1].tensors.items())[:1])
    server = await publish(store)
    settings = {"shared_memory": False, "run_id": "a", "adapters": {"on_demand": False}}
    async with serving(model_folder, weights_address=server.address, **settings) as replica:
        await replica.until(lambda model: served(model) == {"a": 0})
        await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id="b"))
        for run_id in ("a", "b"):
            store.publish(run_id, 1, unfit, adapter_config=sound[1].config)
            model = await replica.until(lambda model: bool(model.update_refused))
            said = f"run {run_id}: version 1 could not be taken: adapter refused"
            assert model.update_refused.startswith(said) and served(model)[run_id] == 0
            waiting = replica.stub.Generate(request(run_id, min_policy_version=2), timeout=20)
            assert (await waiting.read()).held_up == model.update_refused.partition(": ")[2]
            put(store, run_id, 2, sound[2])
            await replica.until(lambda model, of=run_id: served(model)[of] == 2 and not model.update_refused)
            while not (await waiting.read()).HasField("finish"):
                pass
        store.publish("b", 3, unfit, adapter_config=sound[1].config)
        await replica.until(lambda model: bool(model.update_refused))
        await replica.stub.UnloadAdapter(pb.UnloadAdapterRequest(run_id="b"))
        assert not (await replica.model()).update_refused, "it is served no more"
    await server.stop(0)


async def test_a_follower_that_fails_takes_its_adapter_along(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, store = make_model(0), WeightStore(4)
    put(store, "a", 0, random_adapter(base, 1))
    server = await publish(store)
    settings = {"shared_memory": False, "adapters": {"on_demand": False}}
    async with serving(model_folder, weights_address=server.address, **settings) as replica:
        await replica.until(lambda model: served(model) == {"a": 0})

        faults = [RuntimeError("a fault of ours")]

        async def fail(*_: Any, **__: Any) -> None:
            if faults:
                raise faults.pop()
            # The replica's own follower, where it hears of the version after the adapter's had ended.
            raise QuartetError("INVALID_REQUEST", "no")

        monkeypatch.setattr("quartet_inference.adapters.AdapterAdopter.adopt", fail)
        put(store, "a", 1, random_adapter(base, 2))
        await replica.until(lambda model: served(model) == {})
        assert (await replica.generate(request("")))[1]
    await server.stop(0)


async def test_a_publisher_that_goes_back_or_names_the_same_adapter_anew_is_followed(
    model_folder: Path, make_model: Make
) -> None:
    base, store = make_model(0), WeightStore(4)
    first, second = random_adapter(base, 1), random_adapter(base, 2)
    put(store, "a", 0, first)
    server = await publish(store)
    async with serving(model_folder, weights_address=server.address, shared_memory=False) as replica:
        await replica.until(lambda model: served(model) == {"a": 0})
        put(store, "a", 1, second)
        put(store, "a", 2, second)
        await replica.until(lambda model: served(model) == {"a": 2})
        store.reopen_run("a")  # as a trainer that restored a state does
        put(store, "a", 1, second)
        await replica.until(lambda model: served(model) == {"a": 1})
        deltas, _ = await replica.generate(request("a"))
        assert difference(deltas, {1: second.merged}) <= 2e-5
    await server.stop(0)
