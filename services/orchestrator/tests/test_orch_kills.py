"""Runs whose processes are killed: the orchestrator, its machine, the trainer, the host."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
from orch_world import RUN, assert_complete
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator import outage, training
from quartet_orchestrator.book import Book
from quartet_orchestrator.prompts import Prompts, Source
from quartet_orchestrator.rollouts import Rollouts
from quartet_orchestrator.segments import Segments
from quartet_orchestrator.state import RESTING


async def some_of(runs, chance: random.Random, before: int) -> pb.Run:
    """The run, after a while that is counted by what it wrote down: of time, a busy machine has less. Three
    such whiles are less than a whole run."""
    book = runs.get(RUN)
    for _ in range(chance.randrange(7 + before)):
        if book.state.phase not in RESTING:
            await book.changed()
    if book.state.phase not in RESTING:
        await asyncio.sleep(chance.uniform(0.0, 0.01))
    return book.run()


@pytest.mark.parametrize("seed", range(4))
async def test_orchestrator_killed_at_random_points(world, seed):
    """Invariants 1, 2 and 9: same final weights as without a kill, every call applied once, the ledger
    balanced, events without gaps.

    training.py 1 and 2, book.py 3, runs.py 2
    """
    print(f"seed {seed}")
    chance = random.Random(seed)
    undisturbed = await world.undisturbed(world.toml(steps=8, off_policy=0))
    seen: list[int] = []
    kills, run = 0, pb.Run()
    while run.phase not in RESTING:
        async with world.orchestrator() as runs:
            run = await runs.submit(RUN, world.toml(steps=8, off_policy=0), dry_run=False)
            run = await some_of(runs, chance, kills)
            kills += run.phase not in RESTING
            seen += [r.event for r in runs.get(RUN).journal.events(len(seen), 100_000, rollouts=True)]
    print(f"{kills} kills")
    assert kills >= 3
    assert_complete(world, run, steps=8)
    assert world.trainer.disk[RUN, "final"].weights == undisturbed
    assert set(world.trainer.applied_calls.values()) == {1}
    assert seen == list(range(1, run.last_event + 1))


@pytest.mark.parametrize("seed", range(3))
async def test_a_power_cut_loses_nothing_that_the_trainer_has(world, seed, monkeypatch):
    """Invariant 2: after each kill the journal's files end where they were synced last.

    book.py 2, segments.py 1, training.py 1
    """
    print(f"seed {seed}")
    chance = random.Random(seed)
    # Of each journal, the last segment that is on disk, and how far; of one that was never synced nothing is.
    synced: defaultdict[Path, tuple[int, int]] = defaultdict(lambda: (0, 0))
    plain, force, forced = Segments.syncer, os.fsync, []

    def syncer(segments):
        sync, place = plain(segments), (segments._last, segments._end)

        def sync_and_note():
            before = len(forced)
            sync()
            if len(forced) > before:
                synced[segments.folder] = place

        return sync_and_note

    monkeypatch.setattr(Segments, "syncer", syncer)
    monkeypatch.setattr(os, "fsync", lambda file: forced.append(force(file)))
    world.trainer.delay_s = 0.01
    cuts, run = 0, pb.Run()
    while run.phase not in RESTING:
        async with world.orchestrator() as runs:
            run = await runs.submit(RUN, world.toml(steps=6), dry_run=False)
            run = await some_of(runs, chance, cuts)
        if run.phase not in RESTING:
            cuts += 1
            for segment in world.folder.rglob("*.seg"):
                last, end = synced[segment.parent]
                if int(segment.stem) > last:
                    segment.unlink()
                elif int(segment.stem) == last:
                    os.truncate(segment, end)
    print(f"{cuts} cuts")
    assert cuts >= 3
    assert_complete(world, run, steps=6)
    assert set(world.trainer.applied_calls.values()) == {1}


@pytest.mark.parametrize("seed", range(3))
async def test_trainer_and_host_killed_at_random_points(world, seed, monkeypatch):
    """Invariants 2 and 9: a batch that was not applied is replayed.

    training.py 3
    """
    monkeypatch.setattr(training, "GUARD_S", 0.05)
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.2)
    print(f"seed {seed}")
    chance = random.Random(seed)
    world.trainer.delay_s = 0.01
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8), dry_run=False)
        for _ in range(4):
            await asyncio.sleep(chance.uniform(0.02, 0.2))
            name = chance.choice(["trainer", "host"])
            await world.kill(name)
            await asyncio.sleep(chance.uniform(0, 0.1))
            await world.serve(name)
        run = await world.rest(runs)
        assert_complete(world, run, steps=8)
        assert run.max_off_policy_steps_seen <= 1


async def test_a_state_saved_without_an_answer_is_found(world):
    """training.py 2"""
    # Calls 2..4 and 5..7 are two steps, 8 is the SaveState after them.
    world.trainer.lose_answer_of = {8}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        assert_complete(world, await world.rest(runs))


async def test_the_state_is_the_fold_of_the_records(world):
    """What a restart reads is what the process before it knew, at any moment.

    state.py 1 and 2, book.py 1
    """
    world.host.failures = {(task, 1): 1 for task in range(50)}
    world.host.lie_about_version = {task: 99 for task in range(0, 50, 5)}
    world.trainer.delay_s = 0.01
    moments = 0
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=4), dry_run=False)
        book = runs.get(RUN)
        while book.state.phase not in RESTING:
            copy = world.folder / f"copy-{moments}"
            shutil.copytree(world.folder / "runs" / RUN, copy)
            again = Book(copy)
            assert again.state == book.state
            again.close()
            moments += 1
            await book.changed()
    assert moments > 20


@pytest.mark.parametrize(
    ("look", "reason"), [("_violation", "version_unpublished"), ("_difficulty", "no_spread")]
)
async def test_a_rollout_that_was_written_and_not_looked_at_is_looked_at_later(
    world, monkeypatch, look, reason
):
    """Invariants 4 and 9, rollouts.py 1 and 3: a kill between the two."""
    first, free, plain = (
        Prompts([Source("toy", 50)], seed=0).task(0, 0),
        asyncio.Event(),
        world.host._rollouts,
    )
    if look == "_violation":
        world.host.lie_about_version = {first: 99}
    else:
        world.host.flat_tasks = {first}
    toml = world.toml(evals=0).replace("[checks]", '[algorithm]\npreset = "dapo"\n[checks]')

    async def rollouts(request, members):
        if request.task_index != first:
            await free.wait()
        async for rollout in plain(request, members):
            yield rollout

    world.host._rollouts = rollouts
    with monkeypatch.context() as patched:
        patched.setattr(Rollouts, look, lambda *_: None)
        async with world.orchestrator() as runs:
            await runs.submit(RUN, toml, dry_run=False)
            state = runs.get(RUN).state
            while 0 not in state.groups or state.groups[0].missing:
                await runs.get(RUN).changed()
    free.set()
    async with world.orchestrator() as runs:
        assert_complete(world, run := await world.rest(runs))
    assert run.ledger.discarded == {reason: 4}
    assert not any(tokens[0] == first for tokens in world.trainer.disk[RUN, "final"].trained)
