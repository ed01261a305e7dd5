"""Of the runs that share a replica each is told what keeps it from its newest version, and no other's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from quartet.inference import concerning
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.weights.push import push_version
from quartet.weights.store import WeightStore

from .adapters import Adapter, random_adapter
from .inference_replica import Make, Replica, publish, serving
from .random_models import weights_of


def put(store: WeightStore, run_id: str, version: int, adapter: Adapter, *, fits: bool = True) -> None:
    tensors = adapter.tensors if fits else unfit(adapter)
    store.publish(run_id, version, tensors, adapter_config=adapter.config)


def unfit(adapter: Adapter) -> dict[str, Any]:
    return dict(list(adapter.tensors.items())[:1])


def served(model: pb.GetModelResponse) -> dict[str, int]:
    return {one.run_id: one.policy_version for one in model.adapters}


async def first_told(replica: Replica, run_id: str, version: int, within_s: float = 20) -> str:
    """What a request that waits for a version is told at first; nothing where it is told nothing by then."""
    sampling = common_pb2.SamplingParams(max_tokens=1, ignore_eos=True)
    call = replica.stub.Generate(
        pb.GenerateRequest(
            run_id=run_id,
            tokens=pb.TokensPrompt(token_ids=[1, 2]),
            sampling=sampling,
            min_policy_version=version,
        ),
        timeout=60,
    )
    try:
        async with asyncio.timeout(within_s):
            return str((await call.read()).held_up)
    except TimeoutError:
        return ""
    finally:
        call.cancel()


async def test_a_run_is_told_of_its_own_adapter_and_of_no_other(model_folder: Path, make_model: Make) -> None:
    """verdicts.py 3: one that was loaded and is behind, one that is followed and was never taken, one that is
    well."""
    sound, store = random_adapter(make_model(0), 1), WeightStore(4)
    for run_id in ("behind", "well"):
        put(store, run_id, 0, sound)
    store.open_run("never")
    server = await publish(store)
    settings = {"shared_memory": False, "run_id": "never", "adapters": {"on_demand": False}}
    async with serving(model_folder, weights_address=server.address, **settings) as replica:
        for run_id in ("behind", "well"):
            await replica.stub.LoadAdapter(pb.LoadAdapterRequest(run_id=run_id))
        store.close_run("never")
        model = await replica.until(lambda model: "not published" in told_of(model, "never"))
        assert not told_of(model, "well"), "the end of a run is its own"
        assert not await first_told(replica, "well", 6, within_s=0.5)
        put(store, "behind", 1, sound, fits=False)
        put(store, "never", 5, sound, fits=False)
        model = await replica.until(
            lambda model: "version 1" in told_of(model, "behind") and "version 5" in told_of(model, "never")
        )
        told = {run_id: told_of(model, run_id) for run_id in ("behind", "never", "well")}
        assert told["behind"].startswith("version 1 could not be taken: adapter refused")
        assert told["never"].startswith("version 5 could not be taken: adapter refused")
        assert told["well"] == ""
        for run_id, why in told.items():
            assert await first_told(replica, run_id, 6, within_s=20 if why else 0.5) == why
        await server.stop(0)
        # While the server goes, calls end by other words.
        model = await replica.until(lambda model: "Connection refused" in told_of(model, "well"))
        assert told_of(model, "well").startswith("versions are not announced: ")
        assert await first_told(replica, "well", 6) == told_of(model, "well"), "this concerns all of them"
        assert "version 1 could not be taken" not in told_of(model, "well")
        assert served(model) == {"behind": 0, "well": 0}


def told_of(model: pb.GetModelResponse, run_id: str) -> str:
    return concerning(model.update_refusals, run_id)


async def test_what_is_told_of_a_pushed_adapter_stays_while_others_are_served(
    model_folder: Path, make_model: Make
) -> None:
    sound = random_adapter(make_model(0), 1)
    async with serving(model_folder, accept_push=True) as replica:

        async def pushed(run_id: str, version: int, tensors: Any) -> None:
            await push_version(replica.channel, run_id, version, tensors, adapter_config=sound.config)

        await pushed("a", 0, unfit(sound))
        model = await replica.until(lambda model: bool(model.update_refused))
        assert told_of(model, "a").startswith("version 0 could not be taken: adapter refused")
        await pushed("b", 0, sound.tensors)
        model = await replica.until(lambda model: served(model) == {"b": 0})
        assert told_of(model, "a") and not told_of(model, "b")
        assert await first_told(replica, "a", 0) == told_of(model, "a")
        assert not await first_told(replica, "b", 1, within_s=0.5)
        await pushed("a", 1, sound.tensors)
        model = await replica.until(lambda model: served(model) == {"a": 1, "b": 0})
        await replica.until(lambda model: not model.update_refused)


async def test_a_run_whose_adapter_does_not_fit_or_has_no_place_is_told_so(
    model_folder: Path, make_model: Make
) -> None:
    """verdicts.py 3: so that its requests go elsewhere; one that publishes whole models is not refused."""
    sound, store = random_adapter(make_model(0), 1), WeightStore(4)
    put(store, "unfit", 0, sound, fits=False)
    for run_id in ("placed", "placeless"):
        put(store, run_id, 0, sound)
    await asyncio.to_thread(store.publish, "whole", 0, weights_of(make_model(0)))
    store.open_run("never")
    server = await publish(store)
    settings = {"shared_memory": False, "run_id": "never", "adapters": {"max_count": 1}}
    async with serving(model_folder, weights_address=server.address, **settings) as replica:
        assert (await first_told(replica, "placed", 1, within_s=2)) == ""
        assert "adapter refused" in await first_told_late(replica, "unfit")
        assert "max_count = 1" in await first_told_late(replica, "placeless")
        assert await first_told(replica, "whole", 0, within_s=2) == ""
        model = await replica.model()
        assert served(model) == {"placed": 0}
        assert {one.run_id for one in model.update_refusals} == {"unfit", "placeless"}
        assert told_of(model, "unfit").startswith("its adapter could not be loaded: adapter refused")
    await server.stop(0)


async def first_told_late(replica: Replica, run_id: str) -> str:
    """As `first_told`, of a second request: the first one makes the replica look."""
    await first_told(replica, run_id, 0, within_s=1)
    await replica.until(lambda model: bool(told_of(model, run_id)))
    return await first_told(replica, run_id, 0)
