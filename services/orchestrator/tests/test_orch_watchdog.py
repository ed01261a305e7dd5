"""Health of the orchestrator: a run that stands still is told, with what it was doing."""

from __future__ import annotations

import asyncio
import time

import pytest
from orch_world import RUN
from quartet.kit.health import Health
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator import watchdog
from quartet_orchestrator.watchdog import Moving, stalled, watch

SERVICE = "quartet.v1.OrchestratorService"


def test_only_what_stands_still_is_told():
    runs = [Moving("a", 100.0, "training step 3"), Moving("b", 170.0, "exporting the model")]
    assert stalled(runs, 120.0, 60.0) == ""
    assert stalled(runs, 180.0, 60.0) == "run 'a' has moved nothing for 80 s, training step 3"
    assert "'b'" in stalled(runs, 1000.0, 60.0)


@pytest.mark.parametrize("stuck", ["trainer", "host"])
async def test_health_means_that_runs_move(world, monkeypatch, stuck):
    """Invariant 7: NOT_SERVING with the reason, until it moves again; a run that rests is no stall.

    watchdog.py 1 and 2
    """
    monkeypatch.setattr(watchdog, "LOOK_S", 0.02)
    health = Health()
    if stuck == "trainer":
        world.trainer.delay_s = 1.2
        doing = "training step 1"
    else:
        world.host.max_delay_s = 1e9
        doing = "waiting for the rollouts of step 1"
    async with world.orchestrator() as runs:
        beside = asyncio.create_task(watch(runs.moving, health, SERVICE, 0.5))
        await asyncio.sleep(0.1)
        assert health.why_not(SERVICE) == ""
        await runs.submit(RUN, world.toml(steps=1, evals=0), dry_run=False)
        await runs.submit("queued", world.toml(steps=1, evals=0), dry_run=False)
        async with asyncio.timeout(60):
            while doing not in health.why_not(SERVICE):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert "queued" not in health.why_not(SERVICE)
        assert health.why_not("liveness") == ""
        world.trainer.delay_s = 0.0
        if stuck == "trainer":
            assert (await world.rest(runs)).phase == pb.RUN_PHASE_COMPLETED
        else:
            runs.stop(RUN)
            runs.stop("queued")
            assert (await world.rest(runs)).phase == pb.RUN_PHASE_STOPPED
        async with asyncio.timeout(60):
            while health.why_not(SERVICE):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        beside.cancel()


async def test_who_waited_long_for_a_turn_has_the_whole_time_from_then_on(world):
    """watchdog.py 1"""
    world.host.max_delay_s = 1e9
    async with world.orchestrator() as runs, asyncio.timeout(60):
        for run_id in (RUN, "queued"):
            await runs.submit(run_id, world.toml(steps=1, evals=0), dry_run=False)
        while [one.doing for one in runs.moving()] != ["waiting for the rollouts of step 1"]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        world.trainer.delay_s = 0.5  # nothing of the next one is written down meanwhile
        stopped_at = time.monotonic()
        runs.stop(RUN)
        while "queued" not in (moving := {one.run_id: one for one in runs.moving()}):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert moving["queued"].moved_at >= stopped_at
        runs.stop("queued")
