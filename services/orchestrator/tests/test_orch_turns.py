"""Runs that train the whole model take turns; runs that publish adapters do not."""

from __future__ import annotations

import asyncio

from orch_world import notes
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator.state import RESTING
from quartet_orchestrator.turns import Turns

ADAPTER = "[lora]\nenabled = true\n[checks]"


async def test_turns_are_taken_in_order_and_left_by_whoever_has_them():
    """turns.py 1-3"""
    turns, told, order = Turns(2), {}, []

    async def live(name):
        await turns.take(name, lambda before: told.setdefault(name, before))
        order.append(name)

    tasks = {name: asyncio.create_task(live(name)) for name in "abcd"}
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["a", "b"] and told == {"c": ["a", "b"], "d": ["a", "b", "c"]}
    tasks["c"].cancel()
    turns.leave("c")
    turns.leave("nobody")
    await asyncio.sleep(0)
    assert order == ["a", "b"]
    turns.leave("a")
    await asyncio.sleep(0.01)
    assert order == ["a", "b", "d"]


async def test_the_second_whole_model_waits_and_says_for_whom(world):
    world.trainer.delay_s = 0.01
    async with world.orchestrator() as runs:
        await runs.submit("first", world.toml(steps=20), dry_run=False)
        for run_id in ("second", "third"):
            await runs.submit(run_id, world.toml(), dry_run=False)
        await runs.submit("adapter", world.toml(steps=1).replace("[checks]", ADAPTER), dry_run=False)
        assert (await world.rest(runs, "adapter")).phase == pb.RUN_PHASE_COMPLETED
        assert runs.get("first").state.phase not in RESTING
        assert runs.status("second").phase == pb.RUN_PHASE_PENDING and "second" not in world.trainer.runs
        runs.stop("second")
        assert (await world.rest(runs, "second")).phase == pb.RUN_PHASE_STOPPED
        assert (await world.rest(runs, "first")).phase == pb.RUN_PHASE_COMPLETED
        assert (await world.rest(runs, "third")).phase == pb.RUN_PHASE_COMPLETED
        said = await notes(runs, "third")
        await runs.resume("second")
        assert (await world.rest(runs, "second")).phase == pb.RUN_PHASE_COMPLETED
    assert said[0].startswith("waits for run 'first', 'second': a replica of inference serves one run")
    closed = [run_id for run_id in world.trainer.closed if run_id != "adapter"]
    assert closed == ["first", "third", "second"]


async def test_after_a_restart_who_had_begun_goes_on_first(world):
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        for run_id in ("z", "a"):
            await runs.submit(run_id, world.toml(), dry_run=False)
        while runs.get("z").state.step < 1:
            await runs.get("z").changed()
    async with world.orchestrator() as runs:
        assert (await world.rest(runs, "a")).phase == pb.RUN_PHASE_COMPLETED
        assert runs.status("z").phase == pb.RUN_PHASE_COMPLETED
    assert world.trainer.closed == ["z", "a"]
