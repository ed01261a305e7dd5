"""A run whose end the trainer was not told: it was frozen, or the way to it was cut, and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import structlog
from orch_fakes import TrainerRun
from orch_world import RUN, assert_complete, notes, until
from quartet.errors import QuartetError
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import trainer_service_pb2 as tpb
from quartet_orchestrator import closing, execution, trainer_client, turns
from quartet_orchestrator.book import Book
from quartet_orchestrator.state import RESTING
from severed import Way, way_to


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(trainer_client, "CLOSE_S", 0.3)
    monkeypatch.setattr(trainer_client, "CHECK_S", 0.3)
    monkeypatch.setattr(closing, "LOOK_S", 0.3)
    monkeypatch.setattr(trainer_client, "READ_S", 0.2)
    monkeypatch.setattr(closing, "backoff_s", lambda tries: 0.1)


@asynccontextmanager
async def cut_off(world, monkeypatch) -> AsyncIterator[Way]:
    """The world with a way to its trainer."""
    async with way_to(world.addresses["trainer"]) as way:
        monkeypatch.setitem(world.addresses, "trainer", way.address)
        yield way


async def stopped_behind(world, runs, way) -> int:
    """Stops a run when its trainer was cut off; how many calls it had applied.

    It waits for rollouts of step 3, which never come: a batch that was closed by then would be trained to its
    end first, for as long as the run has patience with the trainer.
    """
    rollouts = world.host._rollouts

    async def of_two_steps(request, members):
        if request.min_policy_version:
            await asyncio.Event().wait()
        async for rollout in rollouts(request, members):
            yield rollout

    world.host._rollouts = of_two_steps
    await runs.submit(RUN, world.toml(steps=6, evals=0), dry_run=False)
    book = runs.get(RUN)
    await until(lambda: runs._held[RUN].run.doing == "waiting for the rollouts of step 3")
    way.cut()
    runs.stop(RUN)
    assert (await world.rest(runs)).phase == pb.RUN_PHASE_STOPPED
    assert world.trainer.runs[RUN].applied == book.state.applied_seq_id and not world.trainer.closed
    world.host._rollouts = rollouts
    return book.state.applied_seq_id


async def freed(world) -> None:
    async with asyncio.timeout(60):
        while RUN in world.trainer.runs:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_run_is_stopped_once_a_trainer_that_is_there_has_saved_it(world, monkeypatch):
    """closing.py 1: whoever ends the trainer behind a stop ends it behind the state."""
    looks, look = [], closing._is_somebodys

    async def counted(*told):
        looks.append(await look(*told))
        return looks[-1]

    monkeypatch.setattr(closing, "_is_somebodys", counted)
    monkeypatch.setattr(closing, "LOOK_S", 0.05)
    monkeypatch.setattr(trainer_client, "READ_S", 20.0)
    world.trainer.saved.clear()
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6, evals=0), dry_run=False)
        book = runs.get(RUN)
        while book.state.step < 1:
            await book.changed()
        runs.stop(RUN)
        await until(lambda: len(looks) > trainer_client.CLOSE_S / closing.LOOK_S + 3)
        assert book.state.phase == pb.RUN_PHASE_STOPPING and world.trainer.closed == [RUN]
        assert runs.status(RUN).doing.startswith("waiting for the trainer to close the run")
        world.trainer.saved.set()
        assert (await world.rest(runs)).phase == pb.RUN_PHASE_STOPPED and closing.untold(book) is None
        assert world.trainer.disk[RUN, "closed"].applied == book.state.applied_seq_id
        assert world.trainer.closed == [RUN], "one call waits, however long"
        told = [one for one in await notes(runs) if "saves where the run stands" in one]
        assert len(told) == 1


@pytest.mark.parametrize("lost", [True, False])
async def test_a_trainer_that_comes_back_is_told_that_the_run_has_ended(world, monkeypatch, lost):
    """closing.py 3: it would keep the run's place and memory for good."""
    async with cut_off(world, monkeypatch) as way, world.orchestrator() as runs:
        applied = await stopped_behind(world, runs, way)
        assert not runs.get(RUN).journal.is_open, "what waits for the trainer holds nothing open"
        await asyncio.sleep(1.0)
        assert RUN in world.trainer.runs
        way.mend(lost=lost)
        await freed(world)
        assert world.trainer.disk[RUN, "closed"].applied == applied
        async with asyncio.timeout(60):
            while closing.untold(runs.get(RUN)) is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        closed = len(world.trainer.closed)
        await asyncio.sleep(0.5)
        assert len(world.trainer.closed) == closed, "once it is heard it is not asked again"
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=6)
    assert set(world.trainer.applied_calls.values()) == {1}, "nothing had to be replayed"


@pytest.mark.parametrize("restarted", [False, True])
async def test_the_place_of_a_run_that_the_trainer_had_not_heard_the_end_of_is_given_to_who_waits(
    world, monkeypatch, restarted
):
    """execution.py 1, turns.py 4: told by the process that saw it end, or by the next one."""
    monkeypatch.setattr(turns, "LOOK_AGAIN_S", 1000.0)
    back, at_last = asyncio.Event(), closing.at_last

    async def once_it_is_back(*told):
        await back.wait()
        await at_last(*told)

    monkeypatch.setattr(closing, "at_last", once_it_is_back)
    world.trainer.max_runs = 2
    async with cut_off(world, monkeypatch) as way, AsyncExitStack() as stack:
        runs = await stack.enter_async_context(world.orchestrator())
        await stopped_behind(world, runs, way)
        if restarted:
            await stack.aclose()
            runs = await stack.enter_async_context(world.orchestrator())
        way.mend(lost=True)
        world.trainer.delay_s = 0.02
        for name, steps in (("long", 200), ("next", 1)):
            toml = world.toml(steps=steps, evals=0) + "\n[lora]\nenabled = true"
            await runs.submit(name, toml, dry_run=False)
            if name == "long":
                await until(lambda: runs.get("long").state.step)
        await until(lambda: runs.status("next").doing.startswith("waits for its turn behind run 'long'"))
        assert set(world.trainer.runs) == {RUN, "long"}
        back.set()
        assert (await world.rest(runs, "next")).phase == pb.RUN_PHASE_COMPLETED
        assert runs.get("long").state.phase not in RESTING


async def test_a_run_that_came_to_rest_as_other_settings_were_written_down_stays_at_rest(world, monkeypatch):
    """Its task is there, and waits for the trainer."""
    async with cut_off(world, monkeypatch) as way, world.orchestrator() as runs:
        await stopped_behind(world, runs, way)
        held = runs._held[RUN]
        assert held.task is not None
        await execution.begin_again(held, runs._services)
        assert runs.get(RUN).state.phase == pb.RUN_PHASE_STOPPED and held.run is None
        way.mend(lost=True)
        await freed(world)


async def test_a_run_that_goes_on_is_not_closed_behind_its_back(world, monkeypatch):
    """closing.py 3"""
    async with cut_off(world, monkeypatch) as way, world.orchestrator() as runs:
        await stopped_behind(world, runs, way)
        await runs.resume(RUN)
        way.mend(lost=True)
        monkeypatch.setattr(trainer_client, "CLOSE_S", 60.0)  # else it may be called twice
        assert_complete(world, await world.rest(runs), steps=6)
        assert world.trainer.closed == [RUN], "at its end"


async def test_a_run_that_somebody_else_drives_by_then_is_left_alone(world, monkeypatch):
    """closing.py 2"""
    async with cut_off(world, monkeypatch) as way, world.orchestrator() as runs:
        applied = await stopped_behind(world, runs, way)
        world.trainer.runs[RUN].applied = applied + 2
        way.mend(lost=True)
        await asyncio.sleep(1.5)
        assert RUN in world.trainer.runs and not world.trainer.closed


@pytest.mark.parametrize("by", ["at_last", "close"])
async def test_a_trainer_that_comes_back_behind_the_look_at_it_closes_nothing(tmp_path, by):
    """closing.py 2: whose run it has is not known yet."""
    closed = []

    class BackAtTheSecondCall:
        looks = 0

        async def get(self, run_id):
            self.looks += 1
            if self.looks == 1:
                raise QuartetError("DEADLINE", "no answer in time")
            return tpb.RunState(run_id=run_id, applied_seq_id=7)

        async def close_run(self, run_id, save_at):
            closed.append(run_id)

    book, client = Book(tmp_path), BackAtTheSecondCall()
    book.write(submitted={"run_id": RUN, "config_toml": ""})
    if by == "close":
        assert await closing.close(book, client, goes_on=True, opened=False) == closing.untold(book) == 0
    await closing.at_last(book, client, 0)
    assert client.looks == 2 and not closed and closing.untold(book) is None
    book.close()


async def test_the_next_orchestrator_tells_the_trainer(world, monkeypatch):
    """closing.py 3: the one that saw the run end is gone before the trainer is back."""
    async with cut_off(world, monkeypatch) as way:
        async with world.orchestrator() as runs:
            applied = await stopped_behind(world, runs, way)
        async with world.orchestrator() as runs:
            await asyncio.sleep(0.5)
            way.mend(lost=True)
            await freed(world)
            assert world.trainer.disk[RUN, "closed"].applied == applied
            async with asyncio.timeout(60):
                while closing.untold(runs.get(RUN)) is not None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        closed = len(world.trainer.closed)
        async with world.orchestrator() as runs:
            await asyncio.sleep(1.0)
            assert len(world.trainer.closed) == closed, "once it is heard it is not asked again"
            await runs.resume(RUN)
            assert_complete(world, await world.rest(runs), steps=6)
            assert closing.untold(runs.get(RUN)) is None


async def test_a_disk_that_took_nothing_but_the_name_keeps_no_trainer_waiting(world, monkeypatch):
    """closing.py 3: the next process does not know where to save it, and tells the trainer all the same."""
    async with cut_off(world, monkeypatch) as way:
        async with world.orchestrator() as runs:
            await stopped_behind(world, runs, way)
            (runs.get(RUN).folder / closing.UNTOLD).write_text("")
        async with world.orchestrator() as runs:
            way.mend(lost=True)
            await freed(world)
            assert (RUN, "closed") not in world.trainer.disk
            await runs.resume(RUN)
            assert_complete(world, await world.rest(runs), steps=6)


async def test_what_was_left_to_be_told_is_over_once_the_run_goes_on(world, monkeypatch):
    """closing.py 2 and 3: the trainer has another run of that name by then, made of something else."""
    async with cut_off(world, monkeypatch) as way:
        async with world.orchestrator() as runs:
            await stopped_behind(world, runs, way)
            await runs.resume(RUN)
            world.trainer.disk.clear()
            world.trainer.runs[RUN] = TrainerRun(tpb.RunSpec(base_model="another"))
            way.mend(lost=True)
            run = await world.rest(runs)
            assert run.phase == pb.RUN_PHASE_STOPPED and "another spec" in run.error
        async with world.orchestrator() as runs:
            assert closing.untold(runs.get(RUN)) is None
            await asyncio.sleep(1.0)
            assert RUN in world.trainer.runs and not world.trainer.closed


async def test_an_orchestrator_that_ends_waits_for_no_trainer(world, monkeypatch):
    async with cut_off(world, monkeypatch) as way:
        async with asyncio.timeout(60), world.orchestrator() as runs:
            await stopped_behind(world, runs, way)
        names = [task.get_name() for task in asyncio.all_tasks()]
        assert f"run-{RUN}" not in names


class Client:
    """A trainer that has a run, driven so far, and hears of its end where it is not away."""

    def __init__(self, applied: int = 0, away: bool = False) -> None:
        self.applied, self.away = applied, away
        self.looks = 0
        self.closed: list[int] = []

    async def get(self, run_id):
        self.looks += 1
        return tpb.RunState(run_id=run_id, applied_seq_id=self.applied)

    async def close_run(self, run_id, save_at):
        if self.away:
            raise QuartetError("DEADLINE", "no answer in time")
        self.closed.append(save_at)


@pytest.fixture
def book(tmp_path):
    """Of a run that has applied four calls."""
    one = Book(tmp_path)
    one.write(submitted={"run_id": RUN, "config_toml": ""})
    one.state.applied_seq_id = 4
    yield one
    one.close()


@pytest.mark.parametrize(("goes_on", "save_at"), [(True, 4), (False, 0)])
async def test_a_run_is_saved_at_its_last_call_once_that_is_on_disk_here(book, monkeypatch, goes_on, save_at):
    """closing.py 1: a trainer that comes back from a saved state has none of the answers before it."""
    client, settled = Client(), []

    async def settle():
        settled.append(list(client.closed))

    monkeypatch.setattr(book, "settled", settle)
    closing._keep(book, 2)
    assert await closing.close(book, client, goes_on=goes_on, opened=True) is None
    assert settled == [[]] and client.closed == [save_at]
    assert client.looks == 0, "that the trainer has ours it has said itself"
    assert closing.untold(book) is None, "nothing is left for the next process"


async def test_a_disk_that_keeps_no_answers_does_not_keep_the_trainers_memory(book, monkeypatch):
    """closing.py 1: no state is saved that is ahead of what is known here."""
    client = Client()

    async def full():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(book, "settled", full)
    with structlog.testing.capture_logs() as said:
        assert await closing.close(book, client, goes_on=True, opened=True) is None
    assert client.closed == [0] and ["No space left" in one["why"] for one in said] == [True]


@pytest.mark.parametrize(("applied", "ours"), [(0, True), (4, True), (5, True), (6, False)])
async def test_a_run_is_ours_as_far_as_one_call_that_was_asked_of_it(book, applied, ours):
    """closing.py 2: the call under way may have been applied, and no further one was ever asked for."""
    client = Client(applied)
    assert await closing.close(book, client, goes_on=True, opened=False) is None
    await closing.at_last(book, client, 4)
    assert client.closed == [4, 4] * ours and client.looks == 2


async def test_where_not_even_the_note_can_be_written_this_process_tells_the_trainer(book, monkeypatch):
    """closing.py 3"""
    client = Client(away=True)
    book.folder.joinpath(closing.UNTOLD).mkdir()
    with structlog.testing.capture_logs() as said:
        assert await closing.close(book, client, goes_on=True, opened=True) == 4
    assert [one["event"] for one in said] == [
        "run not closed on the trainer",
        "only this process will tell the trainer",
    ]
    pauses = []

    def pause_s(tries):
        pauses.append(tries)
        client.away = tries < 3
        return 0.0

    monkeypatch.setattr(closing, "backoff_s", pause_s)
    await closing.at_last(book, client, 4)
    assert client.closed == [4] and pauses == [0, 1, 2, 3], "they grow, and the first comes before the call"
