"""The first version of a run, as inference is asked for it: by what the trainer says that it is now."""

from __future__ import annotations

import asyncio

from orch_world import RUN, assert_complete
from quartet.errors import QuartetError
from quartet_orchestrator import outage, training
from quartet_orchestrator.policies import Policies


async def test_its_digest_is_what_this_process_was_told_last(world, monkeypatch):
    """One before it may have seen it come out otherwise, which nobody wrote down."""
    asked: list[bytes] = []

    async def serves_nothing(policies, run_id, version, *, adapter=False, digest=None):
        asked.append(digest)
        raise QuartetError("NOT_READY", "not yet")

    async def told(digest: bytes) -> None:
        async with asyncio.timeout(60):
            while not asked or asked[-1] != digest:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    monkeypatch.setattr(Policies, "serving", serves_nothing)
    monkeypatch.setattr(training, "GUARD_S", 0.05)
    monkeypatch.setattr(outage, "backoff_s", lambda tries: 0.02)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=2, evals=0), dry_run=False)
        await told(b"base")
        world.trainer.base = "otherwise"
        world.trainer.forget()
        await told(b"otherwise")
    asked.clear()
    async with world.orchestrator():
        await told(b"")  # the trainer has the run, and was asked for nothing
        assert set(asked) == {b""}
        world.trainer.forget()
        await told(b"otherwise")


async def test_what_an_earlier_run_of_that_name_left_is_unloaded_before_anything_is_published(world):
    """training.py 7: once, and of no run that has published."""
    await world.serve("policy")
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8, evals=0), dry_run=False)
        while runs.get(RUN).state.step < 1:
            await runs.get(RUN).changed()
    await world.kill("trainer")
    await world.serve("trainer")
    async with world.orchestrator() as runs:
        assert_complete(world, await world.rest(runs), steps=8)
    assert world.trainer.unloaded == [(RUN, None)]
