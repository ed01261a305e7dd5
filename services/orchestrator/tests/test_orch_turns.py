"""Runs that train the whole model take turns; runs that publish adapters have one together."""

from __future__ import annotations

import asyncio
import functools

from orch_fakes import TrainerRun
from orch_world import notes, until
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import trainer_service_pb2 as tpb
from quartet_orchestrator import turns as line
from quartet_orchestrator.state import RESTING
from quartet_orchestrator.turns import Turns

ADAPTER = "[lora]\nenabled = true\n[checks]"


async def test_turns_are_taken_in_order_and_left_by_whoever_has_them():
    """turns.py 1-3"""
    turns, told, order = Turns(2), {}, []

    async def live(name):
        await turns.take(name, lambda before: told.setdefault(name, before), shares=False)
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


async def test_those_who_share_have_one_turn_together_and_overtake_nobody():
    """turns.py 1: a whole model that waits is not kept waiting by adapters that come after it."""
    turns, running = Turns(2), []

    async def live(name):
        await turns.take(name, lambda before: None, shares=name.startswith("adapter"))
        running.append(name)

    async def then(expected):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert running == expected

    names = ("adapter 1", "whole 1", "adapter 2", "whole 2", "adapter 3")
    tasks = [asyncio.create_task(live(name)) for name in names]
    await then(["adapter 1", "whole 1", "adapter 2"])
    turns.leave("adapter 1")
    await then(["adapter 1", "whole 1", "adapter 2"])
    turns.leave("adapter 2")
    await then(["adapter 1", "whole 1", "adapter 2", "whole 2"])
    turns.leave("whole 1")
    await then([*names[:3], "whole 2", "adapter 3"])
    await asyncio.gather(*tasks)


async def test_a_run_that_shares_waits_for_none_that_it_shares_with():
    """turns.py 2"""
    turns, told = Turns(1), {}
    names = ("whole 1", "adapter 1", "adapter 2", "whole 2", "adapter 3")
    tasks = [
        asyncio.create_task(
            turns.take(name, functools.partial(told.__setitem__, name), shares=name.startswith("adapter"))
        )
        for name in names
    ]
    await asyncio.sleep(0)
    expected = {"adapter 1": ["whole 1"], "adapter 2": ["whole 1"]}
    expected |= {"whole 2": list(names[:3]), "adapter 3": list(names[:4])}
    assert told == expected
    assert {name: turns.before(name) for name in names} == {"whole 1": [], **expected}
    for name in names:
        turns.leave(name)
    await asyncio.gather(*tasks)


async def test_who_finds_no_room_waits_in_its_place_until_one_of_the_others_leaves():
    """turns.py 4"""
    turns, told, tasks = Turns(1), {}, {}

    async def take(name):
        tasks[name] = asyncio.create_task(
            turns.take(name, functools.partial(told.__setitem__, name), shares=not name.startswith("whole"))
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    def waiting():
        return [name for name, task in tasks.items() if not task.done()]

    for name in "abc":
        await take(name)
    assert not waiting() and not turns.is_full
    assert turns.give_way("c") == ["a", "b"] and turns.is_full
    for name in ("c", "d", "whole"):
        await take(name)
    assert waiting() == ["c", "d", "whole"], "nobody overtakes"
    assert told == {"d": ["a", "b", "c"], "whole": ["a", "b", "c", "d"]}
    assert turns.before("c") == ["a", "b"] and turns.before("d") == ["a", "b", "c"]
    turns.leave("a")
    await asyncio.sleep(0.01)
    assert waiting() == ["whole"] and not turns.is_full and turns.before("d") == []
    assert turns.give_way("d") == ["b", "c"], "it asks the trainer, too"
    turns.leave("b")
    turns.opened("d")
    assert turns.give_way("c") == ["d"] and turns.give_way("d") == [], "nobody is left who would make room"
    turns.leave("d")
    await take("c")
    assert waiting() == ["whole"]
    turns.leave("c")
    await asyncio.gather(*tasks.values())


async def test_the_second_whole_model_waits_and_says_for_whom(world):
    world.trainer.delay_s = 0.01
    async with world.orchestrator() as runs:
        await runs.submit("first", world.toml(steps=20), dry_run=False)
        for run_id in ("second", "third"):
            await runs.submit(run_id, world.toml(), dry_run=False)
        await runs.submit("adapter", world.toml(steps=1).replace("[checks]", ADAPTER), dry_run=False)
        assert runs.status("second").phase == pb.RUN_PHASE_PENDING and "second" not in world.trainer.runs
        runs.stop("second")
        assert (await world.rest(runs, "second")).phase == pb.RUN_PHASE_STOPPED
        assert (await world.rest(runs, "first")).phase == pb.RUN_PHASE_COMPLETED
        assert (await world.rest(runs, "third")).phase == pb.RUN_PHASE_COMPLETED
        said = await notes(runs, "third")
        assert (await world.rest(runs, "adapter")).phase == pb.RUN_PHASE_COMPLETED
        await runs.resume("second")
        assert (await world.rest(runs, "second")).phase == pb.RUN_PHASE_COMPLETED
    assert said[0].startswith("waits for runs 'first', 'second': a replica of inference serves one run")
    assert world.trainer.closed == ["first", "third", "adapter", "second"]


async def test_runs_that_publish_adapters_go_on_side_by_side_and_a_whole_model_after_them(world):
    world.trainer.delay_s = 0.01
    async with world.orchestrator() as runs:
        await runs.submit("long", world.toml(steps=20).replace("[checks]", ADAPTER), dry_run=False)
        await runs.submit("short", world.toml(steps=1).replace("[checks]", ADAPTER), dry_run=False)
        await runs.submit("whole", world.toml(steps=1), dry_run=False)
        assert (await world.rest(runs, "short")).phase == pb.RUN_PHASE_COMPLETED
        assert runs.get("long").state.phase not in RESTING
        assert runs.status("whole").phase == pb.RUN_PHASE_PENDING
        assert (await world.rest(runs, "whole")).phase == pb.RUN_PHASE_COMPLETED
        assert (await notes(runs, "whole"))[0].startswith("waits for runs 'long', 'short'")
    assert world.trainer.closed == ["short", "long", "whole"]


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


async def test_a_place_that_is_freed_is_one_run_s_and_nobody_gives_way_to_who_came_later():
    """turns.py 4"""
    turns, tasks = Turns(1), {}

    async def take(*names):
        for name in names:
            tasks[name] = asyncio.create_task(turns.take(name, lambda others: None, shares=True))
        await asyncio.sleep(0.01)

    await take(*"abcd")
    for name in "ab":
        turns.opened(name)
    assert turns.give_way("c") == ["a", "b"] and turns.give_way("d") == ["a", "b"]
    await take(*"cde")
    turns.leave("e")  # it had no turn, and leaves no room
    await asyncio.sleep(0.01)
    assert not tasks["c"].done() and not tasks["d"].done()
    turns.leave("a")
    turns.leave("a")
    await asyncio.sleep(0.01)
    assert tasks["c"].done() and not tasks["d"].done()
    turns.has_room()
    await asyncio.sleep(0.01)
    assert tasks["d"].done()
    tasks["e"].cancel()
    # Somebody else's runs fill the trainer: who has waited for it longest gives way to nobody.
    turns = Turns(1)
    await take("c")
    assert turns.give_way("c") == []
    await take("e")
    assert turns.give_way("c") == [] and turns.give_way("e") == ["c"]


async def test_runs_that_the_trainer_has_no_room_for_wait_for_one_to_end(world):
    """turns.py 4, training.py 8: however long that takes, in order, and no restart of the trainer gives the
    place of one that has begun to one that waits."""
    # Longer than a channel takes to connect again, and shorter than the first run is.
    world.trainer.delay_s, world.trainer.max_runs, world.patience_s = 0.02, 2, 2.0
    steps = {"a": 40, "b": 120, "c": 1, "d": 1}
    async with world.orchestrator() as runs:
        for name, count in steps.items():
            await runs.submit(name, world.toml(steps=count).replace("[checks]", ADAPTER), dry_run=False)
        for name in "ab":
            while runs.get(name).state.step < 1:
                await runs.get(name).changed()
        waits = "waits for its turn behind runs {}: stop them, or wait for their ends"
        assert runs.status("c").doing == waits.format("'a', 'b'")
        assert runs.status("d").doing == waits.format("'a', 'b', 'c'")
        assert not {one.run_id for one in runs.moving()} & {"c", "d"}, "nothing of them stands still"
        await world.kill("trainer")
        await world.serve("trainer")
        for name in steps:
            assert (await world.rest(runs, name)).phase == pb.RUN_PHASE_COMPLETED
        said = (await notes(runs, "c"))[0]
        assert said.startswith("waits for runs 'a', 'b': the trainer has no room for more runs at once")
    assert world.trainer.closed == ["a", "c", "d", "b"]


async def test_the_first_of_those_who_gave_way_looks_again_by_itself(monkeypatch):
    """turns.py 4"""
    monkeypatch.setattr(line, "LOOK_AGAIN_S", 0.05)
    turns, tasks = Turns(1), {}

    def take(*names):
        for name in names:
            tasks[name] = asyncio.create_task(turns.take(name, lambda others: None, shares=True))

    take(*"abc")
    await asyncio.gather(*tasks.values())
    turns.opened("a")
    turns.give_way("b")
    turns.give_way("c")
    take(*"bc")
    for _ in range(3):
        await tasks["b"]
        assert not tasks["c"].done(), "its turn to look comes when the other has found room"
        assert turns.give_way("b") == ["a"]
        take("b")
    await tasks["b"]
    turns.opened("b")
    await tasks["c"]


async def test_a_run_of_another_trainer_neither_makes_room_nor_keeps_others_from_looking(monkeypatch):
    """turns.py 4"""
    monkeypatch.setattr(line, "LOOK_AGAIN_S", 0.05)
    turns = Turns(2)
    await turns.take("elsewhere", lambda others: None, shares=True, trains_here=False)
    for name in "ab":
        await turns.take(name, lambda others: None, shares=True)
    assert turns.give_way("a") == [], "the other one has no place there"
    turns.opened("a")
    assert turns.give_way("b") == ["a"]
    async with asyncio.timeout(5):
        await turns.take("b", lambda others: None, shares=True)


async def test_a_place_that_a_foreign_client_leaves_at_the_trainer_is_found(world, monkeypatch):
    """turns.py 4 and 2: no run here has ended, and whom it waits for is told once."""
    monkeypatch.setattr(line, "LOOK_AGAIN_S", 0.1)
    world.trainer.delay_s, world.trainer.max_runs = 0.02, 2
    world.trainer.runs["foreign"] = TrainerRun(tpb.RunSpec(base_model="m"))
    async with world.orchestrator() as runs:
        await runs.submit("long", world.toml(steps=200).replace("[checks]", ADAPTER), dry_run=False)
        await until(lambda: runs.get("long").state.step)
        await runs.submit("next", world.toml(steps=1).replace("[checks]", ADAPTER), dry_run=False)
        await until(lambda: runs.status("next").doing.startswith("waits for its turn behind run 'long'"))
        await asyncio.sleep(0.5)
        assert runs.status("next").phase == pb.RUN_PHASE_PENDING
        del world.trainer.runs["foreign"]
        assert (await world.rest(runs, "next")).phase == pb.RUN_PHASE_COMPLETED
        assert runs.get("long").state.phase not in RESTING
        said = await notes(runs, "next")
    assert sum(one.startswith("waits for run 'long'") for one in said) == 1


async def test_a_run_that_no_other_here_makes_room_for_waits_as_long_as_it_has_patience(world):
    """turns.py 4"""
    world.trainer.max_runs, world.patience_s = 0, 0.3
    async with world.orchestrator() as runs:
        await runs.submit("a", world.toml(), dry_run=False)
        stopped = await world.rest(runs, "a")
        assert stopped.phase == pb.RUN_PHASE_STOPPED
        assert stopped.error.startswith("the trainer could not go on for ") and "max_runs" in stopped.error
        world.trainer.max_runs = 1
        await runs.resume("a")
        assert (await world.rest(runs, "a")).phase == pb.RUN_PHASE_COMPLETED
