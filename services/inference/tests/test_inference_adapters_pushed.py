"""Adapters of several runs that arrive at one replica within one adoption: each is served, and none mixed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.inference import UpdateRefusal, concerning
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.weights.push import push_version
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor
from quartet.weights.versions import Version
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.pushed import Arrivals, adopt_pushed

from .adapters import Adapter, canary_of, random_adapter
from .inference_replica import Make, Replica, publish, serving
from .random_models import weights_of
from .told import Told


def served(model: pb.GetModelResponse) -> dict[str, int]:
    return {one.run_id: one.policy_version for one in model.adapters}


async def push(replica: Replica, run_id: str, version: int, adapter: Adapter) -> None:
    await push_version(replica.channel, run_id, version, adapter.tensors, adapter_config=adapter.config)


async def difference(replica: Replica, run_id: str, version: int, model: Any) -> float:
    """The largest |service - plain forward| of an answer of the run, sampled by this version alone."""
    told = Told([1, 2, 3])
    sampling = common_pb2.SamplingParams(max_tokens=16, ignore_eos=True)
    request = pb.GenerateRequest(
        run_id=run_id, tokens=pb.TokensPrompt(token_ids=told.prompt), sampling=sampling, min_policy_version=0
    )
    deltas, _ = await replica.generate(request)
    for delta in deltas:
        spans = [(one.start, one.length, one.policy_version) for one in delta.spans]
        told.extend(delta.token_ids, delta.logprobs, spans)
    return told.difference({version: model})


async def test_what_came_last_decides_what_is_taken_next() -> None:
    """pushed.py 1, 2"""
    store, arrivals = WeightStore(keep=1), Arrivals("")
    number = Tensor("F32", (1,), bytes(4))

    async def put(run_id: str, config: str = "") -> None:
        await asyncio.to_thread(store.publish, run_id, 0, {"w": number}, adapter_config=config)

    async def due() -> tuple[int, str]:
        taken, version = await store.wait_arrived(arrivals.next)
        return taken, version.run_id

    await put("a", "{}")
    await put("whole")
    taken, run_id = await due()
    assert run_id == "whole", "it would take the adapter along"
    arrivals.unfit.add(taken)
    assert (await due())[1] == "a"
    await put("b", "{}")
    arrivals.without_room.add((await due())[0])
    taken, run_id = await due()
    assert run_id == "b", "after what there is no room for"
    arrivals.served.add(taken)
    await put("other")
    assert (await due())[1] == "other"
    await put("c", "{}")
    taken, run_id = await due()
    assert run_id == "c", "the models before it would leave for it"
    arrivals.served.add(taken)
    for run_id in ("a", "whole", "b"):
        store.close_run(run_id)
    assert await store.wait_arrived(lambda arrived: [arrivals.next(arrived)]) == [None]
    assert arrivals.served == {taken} and not arrivals.unfit | arrivals.without_room, "the rest is forgotten"


class FirstStaging:
    """Of the engine: the first adapter is staged once `go_on` is set, and those after it at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()
        at_once = EmbeddedEngine.stage_adapter

        async def stage(engine: EmbeddedEngine, *arguments: Any) -> Any:
            if not self.begun.is_set():
                self.begun.set()
                await self.go_on.wait()
            return await at_once(engine, *arguments)

        monkeypatch.setattr(EmbeddedEngine, "stage_adapter", stage)


async def test_adapters_that_runs_push_within_one_adoption_are_all_served(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pushed.py 1: the second and the third come while the first is taken."""
    base, first = make_model(0), FirstStaging(monkeypatch)
    adapters = {run_id: random_adapter(base, number) for number, run_id in enumerate("abc")}
    async with serving(model_folder, accept_push=True) as replica:
        await push(replica, "a", 0, adapters["a"])
        await first.begun.wait()
        await asyncio.gather(*(push(replica, run_id, 0, adapters[run_id]) for run_id in "bc"))
        first.go_on.set()
        await replica.until(lambda model: served(model) == {"a": 0, "b": 0, "c": 0})
        for run_id, adapter in adapters.items():
            assert await difference(replica, run_id, 0, adapter.merged) <= 2e-5


async def test_a_run_that_pushes_twice_within_one_adoption_is_served_at_its_newest(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, first = make_model(0), FirstStaging(monkeypatch)
    adapters = [random_adapter(base, number) for number in range(4)]
    async with serving(model_folder, accept_push=True) as replica:
        await push(replica, "a", 0, adapters[0])
        await first.begun.wait()
        await push(replica, "b", 0, adapters[1])
        await push(replica, "a", 1, adapters[2])
        await push(replica, "b", 1, adapters[3])
        first.go_on.set()
        model = await replica.until(lambda model: served(model) == {"a": 1, "b": 1})
        assert model.updates_applied == 3, "what was passed over was not taken"
        assert await difference(replica, "a", 1, adapters[2].merged) <= 2e-5
        assert await difference(replica, "b", 1, adapters[3].merged) <= 2e-5


async def test_an_adapter_without_room_holds_up_no_other_run(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pushed.py 2"""
    base = make_model(0)
    async with serving(model_folder, accept_push=True, adapters={"max_count": 2}) as replica:
        for number, run_id in enumerate("abc"):
            await push(replica, run_id, 0, random_adapter(base, number))
        await replica.until(lambda model: served(model) == {"a": 0, "b": 0} and bool(model.update_refused))
        await push(replica, "a", 1, random_adapter(base, 4))
        await push(replica, "b", 1, random_adapter(base, 5))
        model = await replica.until(lambda model: served(model) == {"a": 1, "b": 1})
        assert "version 0 could not be taken" in concerning(model.update_refusals, "c")
        assert not concerning(model.update_refusals, "a")


async def test_what_has_no_room_is_tried_again_although_others_go_on_arriving() -> None:
    """pushed.py 2: whenever one is taken, another one is there."""
    store, number, tried, taken = WeightStore(keep=1), Tensor("F32", (1,), bytes(4)), 0, asyncio.Event()

    class Crowded:
        async def adopt(self, version: Version) -> None:
            nonlocal tried
            if version.run_id == "c":
                tried += 1
                if tried < 4:
                    raise QuartetError("OVERLOADED", "no room now")
                taken.set()
                return
            await asyncio.sleep(0.01)
            store.publish(version.run_id, version.number + 1, {"w": number}, adapter_config="{}")

    for run_id in "cab":
        store.publish(run_id, 0, {"w": number}, adapter_config="{}")
    adopter: Any = Crowded()
    told: list[UpdateRefusal] = []
    adopting = asyncio.create_task(adopt_pushed(store, "", adopter, lambda version: None, told.append))
    async with asyncio.timeout(10):
        await taken.wait()
    assert told == [UpdateRefusal("version 0 could not be taken: no room now", "c")] * 3
    adopting.cancel()


async def test_an_adapter_that_does_not_fit_leaves_the_whole_model_that_was_pushed_before(
    model_folder: Path, make_model: Make
) -> None:
    """adapters.py 4: the folder's model would answer, and nobody pushes the other one again."""
    adapter = random_adapter(make_model(0), 1)
    torn = dict(list(adapter.tensors.items())[:1])
    foreign = canary_of(adapter.merged)
    foreign.token_ids[0] = 1 << 20
    async with serving(model_folder, accept_push=True) as replica:
        await push_version(replica.channel, "whole", 3, weights_of(make_model(7)))
        await replica.until_version("whole", 3)
        await push_version(replica.channel, "a", 0, torn, adapter_config=adapter.config)
        await push_version(
            replica.channel, "b", 0, adapter.tensors, canary=foreign, adapter_config=adapter.config
        )
        model = await replica.until(
            lambda model: all(concerning(model.update_refusals, run_id) for run_id in "ab")
        )
        assert (model.run_id, model.policy_version, model.updates_applied) == ("whole", 3, 1)
        await push(replica, "a", 1, adapter)
        model = await replica.until(lambda model: served(model) == {"a": 1})
        assert (model.run_id, model.policy_version) == ("", 0)
        assert await difference(replica, "a", 1, adapter.merged) <= 2e-5


@pytest.mark.parametrize("loaded", [False, True])
async def test_first_versions_that_a_trainer_publishes_at_once_are_all_served(
    model_folder: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    """adapters.py 1: one of the runs is followed anyway, the other is loaded, or asked for by a request."""
    base, store, first = make_model(0), WeightStore(4), FirstStaging(monkeypatch)
    adapters = {run_id: random_adapter(base, number) for number, run_id in enumerate("ab")}
    for run_id in adapters:
        store.open_run(run_id)
    server = await publish(store)
    async with serving(model_folder, weights_address=server.address, shared_memory=False) as replica:
        for run_id, adapter in adapters.items():
            store.publish(run_id, 0, adapter.tensors, adapter_config=adapter.config)
        ask: Callable[[str], Any] = lambda run_id: replica.stub.LoadAdapter(  # noqa: E731
            pb.LoadAdapterRequest(run_id=run_id)
        )
        answers = [asyncio.ensure_future(ask(run_id)) for run_id in adapters] if loaded else []
        asked = [difference(replica, run_id, 0, one.merged) for run_id, one in adapters.items()]
        compared = [asyncio.create_task(one) for one in asked]
        await first.begun.wait()
        await asyncio.sleep(0.2)
        first.go_on.set()
        assert [answer.version for answer in await asyncio.gather(*answers)] == [0] * len(answers)
        assert max(await asyncio.gather(*compared)) <= 2e-5
        assert served(await replica.model()) == {"a": 0, "b": 0}
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert [names.count(f"follow-adapter-{run_id}") for run_id in adapters] == [1, 1]
        assert not (await replica.model()).update_refused
    await server.stop(0)
