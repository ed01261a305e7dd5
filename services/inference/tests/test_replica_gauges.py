"""A replica as Prometheus sees it, read off the endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from quartet.kit.channel import connect
from quartet.kit.health import Health
from quartet.kit.metrics import scraped
from quartet.kit.server import start
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.weights.store import WeightStore
from quartet_inference import app, gauges
from quartet_inference.config import InferenceConfig
from quartet_inference.gauges import ReplicaGauges
from quartet_inference.service import InferenceServicer

from .inference_replica import Make, Replica, publish
from .random_models import weights_of

Scrape = Callable[[], Awaitable[dict[str, float]]]
P = "quartet_inference_"


def gauges_of(services: list[Any]) -> ReplicaGauges:
    servicer = services[0].servicer
    assert isinstance(servicer, InferenceServicer)
    return ReplicaGauges(servicer.model, servicer.prompt_tokens, asyncio.get_running_loop())


def request(max_tokens: int, n: int = 1) -> pb.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(tokens=pb.TokensPrompt(token_ids=range(1, 40)), sampling=sampling, n=n)


async def test_what_a_replica_tells(model_folder: Path, make_model: Make, scrape: Scrape) -> None:
    """gauges.py 1 and 2: what GetModel says, from no weights to the second version."""
    store = WeightStore(keep=2)
    trainer = await publish(store)
    config = InferenceConfig(
        model=model_folder,
        max_model_len=256,
        embedded={"kv_cache_bytes": 1 << 24, "max_num_seqs": 8},
        weights_address=trainer.address,
    )
    async with app.services(config, Health()) as services:
        server = await start(services, config.server, Health())
        with scraped(gauges_of(services)):
            async with connect(server.address) as channel:
                replica = Replica(channel, Health())
                empty = await scrape()
                for version in range(2):
                    store.publish("run-a", version, weights_of(make_model(version)))
                    await replica.until_version("run-a", version)
                before = await scrape()
                await replica.generate(request(10, n=3))
                await replica.generate(request(10))
                after = await scrape()
                model = await replica.model()
                await replica.stub.Pause(pb.PauseRequest())
                waiting = asyncio.create_task(replica.generate(request(10)))
                while not (await replica.model()).waiting:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                paused = await scrape()
                await replica.stub.Resume(pb.ResumeRequest())
                await waiting
        assert not [name for name in await scrape() if name.startswith(f"{P}running")]
        await server.stop(0)
    await trainer.stop(0)

    assert not [name for name in empty if name.startswith(f"{P}policy_version")], "nothing is served yet"
    assert empty[f"{P}updates_total"] == 0
    assert after[f'{P}engine_info{{dtype="float32",engine="embedded"}}'] == 1
    assert after[f'{P}policy_version{{run="run-a",weights="model"}}'] == 1
    assert after[f"{P}updates_total"] == model.updates_applied >= 1
    assert after[f"{P}last_update_pause_seconds"] == pytest.approx(model.last_update_pause_ms / 1000) != 0
    assert after[f"{P}tokens_sampled_total"] - before[f"{P}tokens_sampled_total"] == 40
    assert after[f"{P}prompt_tokens_total"] - before[f"{P}prompt_tokens_total"] == 4 * 39
    # Two members share the first one's, and the second request finds all that decides nothing.
    assert 3 * 39 - 3 <= after[f"{P}cached_tokens_total"] - before[f"{P}cached_tokens_total"] <= 3 * 39
    assert after[f"{P}max_num_seqs"] == 8 and after[f"{P}max_model_len_tokens"] == 256
    for name in ("running", "waiting", "adapters", "paused", "out_of_service", "update_refused"):
        assert after[P + name] == 0, name
    assert paused[f"{P}paused"] == 1 and paused[f"{P}waiting"] == 1


def test_adapters_and_what_is_wrong_are_told() -> None:
    """gauges.py 2."""
    told = pb.GetModelResponse(
        run_id="", policy_version=0, out_of_service="the canary died", update_refused="checksum"
    )
    told.adapters.add(run_id="a", policy_version=3)
    told.adapters.add(run_id="b", policy_version=7)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in gauges._families(told, (0, 0))
        for sample in family.samples
    }
    assert found[f"{P}policy_version", "", "model"] == 0
    assert found[f"{P}policy_version", "a", "adapter"] == 3
    assert found[f"{P}policy_version", "b", "adapter"] == 7
    assert found[f"{P}adapters",] == 2
    assert found[f"{P}out_of_service",] == found[f"{P}update_refused",] == 1


async def test_a_loop_that_is_stuck_tells_nothing(scrape: Scrape, monkeypatch: pytest.MonkeyPatch) -> None:
    """gauges.py 1"""
    with (
        scraped(ReplicaGauges(pb.GetModelResponse, lambda: (0, 0), asyncio.get_running_loop())),
        ThreadPoolExecutor(1) as beside,
    ):
        assert f"{P}running" in await scrape()
        monkeypatch.setattr(gauges, "LOOP_SECONDS", 0.1)
        told = beside.submit(lambda: asyncio.run(scraping(scrape))).result(60)  # this loop stands still
        assert f"{P}running" not in told


async def scraping(scrape: Scrape) -> dict[str, float]:
    return await scrape()
