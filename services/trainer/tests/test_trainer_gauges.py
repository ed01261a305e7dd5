"""The trainer as Prometheus sees it, read off the endpoint."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from quartet.kit.channel import connect
from quartet.kit.metrics import scraped
from quartet.kit.server import start
from quartet.v1 import trainer_service_pb2 as pb
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceStub
from quartet_trainer.assembly import assemble
from quartet_trainer.config import TrainerConfig
from quartet_trainer.worker import Worker

from .conftest import Made, Served

Scrape = Callable[[], Awaitable[dict[str, float]]]
P = "quartet_trainer_"


async def test_what_a_trainer_tells(
    folder: Path, tmp_path: Path, make_samples: Callable[..., Made], scrape: Scrape
) -> None:
    """gauges.py 1 and 3."""
    config = TrainerConfig(state_dir=tmp_path, device="cpu", max_runs=3)
    trainer = assemble(config)
    server = await start(trainer.services, config.server, trainer.health)
    with scraped(trainer.gauges):
        async with connect(server.address) as channel:
            served = Served(TrainerServiceStub(channel), channel, tmp_path)
            empty = await scrape()
            await served.create(base_model=str(folder))
            await served.one_step(1, make_samples())
            await served.forward_backward(
                4, make_samples(), loss=pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT)
            )
            await served.optim_step(5, learning_rate=0.0)
            stepped = await scrape()
            go_on = threading.Event()
            blocked = asyncio.create_task(trainer.worker.run(go_on.wait))
            sent = asyncio.create_task(served.forward_backward(6, make_samples()))
            while (held := await scrape())[f"{P}jobs"] < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            go_on.set()
            await asyncio.gather(blocked, sent)
            await served.stub.CloseRun(pb.CloseRunRequest(run_id="r"))
            closed = await scrape()
    assert f"{P}runs" not in await scrape()
    await server.stop(0)
    await trainer.worker.close()

    assert empty[f"{P}runs"] == 0 and empty[f"{P}max_runs"] == 3 and empty[f"{P}jobs"] == 0
    assert stepped[f"{P}runs"] == 1
    assert stepped[f'{P}run_steps{{outcome="applied",run="r"}}'] == 2
    assert stepped[f'{P}run_steps{{outcome="skipped",run="r"}}'] == 0
    assert stepped[f'{P}policy_version{{run="r"}}'] == 2
    assert stepped[f'{P}published_version{{run="r"}}'] == 1
    assert stepped[f'{P}held_bytes{{what="samples"}}'] == stepped[f'{P}held_bytes{{what="experts"}}'] == 0
    size = sum(len(one.SerializeToString()) for one in make_samples())
    assert held[f'{P}held_bytes{{what="samples"}}'] == size
    seconds = [one[f"{P}computing_seconds_total"] for one in (empty, stepped, held, closed)]
    assert seconds[0] == 0 and seconds == sorted(seconds) and seconds[1] > 0
    assert closed[f"{P}runs"] == 0 and not [name for name in closed if 'run="r"' in name]


async def test_computing_is_counted_while_it_goes_on_and_waiting_is_not() -> None:
    """gauges.py 2"""
    worker, go_on = Worker(threads=1, deterministic=False), threading.Event()
    began = time.monotonic()
    waits = asyncio.create_task(worker.run(go_on.wait))
    seen = [worker.computed_s]
    while seen[-1] < 0.2 and time.monotonic() - began < 60:
        await asyncio.sleep(0.001)
        seen.append(worker.computed_s)
    go_on.set()
    await waits
    ended = worker.computed_s
    assert seen == sorted(seen) and 0.2 <= seen[-1] <= ended <= time.monotonic() - began
    await asyncio.sleep(0.1)
    assert worker.computed_s == ended

    def fails() -> None:
        time.sleep(0.05)
        raise KeyError

    with pytest.raises(KeyError):
        await worker.run(fails)
    assert worker.computed_s >= ended + 0.05
    await worker.close()
