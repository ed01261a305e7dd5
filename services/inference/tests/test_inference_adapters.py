"""Adapters over loopback gRPC: followed by run, replaced in flight, loaded, unloaded, asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from quartet.errors import QuartetError, from_rpc
from quartet.inference import INFERENCE
from quartet.v1 import common_pb2, rollout_pb2, weights_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet_inference import adapter_base, adapters, answering, lookup
from quartet_inference.engine import ServedWeights
from quartet_inference.loads import Loads

from .adapters import Adapter, canary_of, random_adapter
from .engine_calls import until
from .inference_replica import Make, publish, serving
from .random_models import weights_of

PROMPT = list(range(20))


def put(
    store: WeightStore, run_id: str, version: int, adapter: Adapter, canary: Any = None
) -> weights_pb2.WeightManifest:
    return store.publish(run_id, version, adapter.tensors, adapter_config=adapter.config, canary=canary)


def request(run_id: str, max_tokens: int = 8, **fields: Any) -> pb.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompt = pb.TokensPrompt(token_ids=PROMPT)
    return pb.GenerateRequest(run_id=run_id, tokens=prompt, sampling=sampling, **fields)


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


def served(model: Any) -> dict[str, int]:
    return {one.run_id: one.policy_version for one in model.adapters}


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
    """loads.py 1 and 2: the orchestrator waits a minute, and asks again; no fetch begins anew with that."""
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
            if run_id == "a" and late:
                await until(lambda: replica.health.why_not(INFERENCE) == "")

    monkeypatch.setattr(adapter_base, "get_manifest", looked)
    settings = {"shared_memory": False, "run_id": "a", "adapters": {"on_demand": False}}
    async with serving(model_folder, weights_address=server.address, **settings) as replica:
        loads = [replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id=run_id)) for run_id in "bc"]
        assert [answer.version for answer in await asyncio.gather(*loads)] == [0, 0]
        assert served(await replica.model()) == {"b": 0, "c": 0} and looks.count("a") == 2
    await server.stop(0)
