"""Whose that is what a trainer has of a name: nothing of another run goes with one that is deleted."""

from __future__ import annotations

import copy
import shutil

import pytest
from orch_fakes import TrainerRun
from orch_world import RUN
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as tpb
from quartet_orchestrator import claim, deletion, trainer_client
from test_orch_deletion import AWAY, completed, folders, refused, states, until

ANOTHERS = tpb.RunSpec(base_model="another's")
STATE = (RUN, "of somebody")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(trainer_client, "READ_S", 0.5)
    monkeypatch.setattr(trainer_client, "CLOSE_S", 0.5)
    monkeypatch.setattr(deletion, "backoff_s", lambda tries: 0.05)


def damage(world) -> None:
    (segment,) = (world.folder / "runs" / RUN).glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)


def become_anothers(world, what: str) -> None:
    """The name is another run's at the trainer: its states, one that is open, or one driven further."""
    own = next(one.spec for (run_id, _), one in world.trainer.disk.items() if run_id == RUN)
    if what == "states":
        world.trainer.disk = {STATE: TrainerRun(ANOTHERS, applied=3)}
    if what == "open":
        world.trainer.runs[RUN] = TrainerRun(ANOTHERS, applied=1)
    if what == "ahead":
        world.trainer.runs[RUN] = TrainerRun(own, applied=999)


def nothing_changed(world, before) -> bool:
    return (dict(world.trainer.disk), dict(world.trainer.runs), list(world.trainer.closed)) == before


def there(world):
    return dict(world.trainer.disk), dict(world.trainer.runs), list(world.trainer.closed)


@pytest.mark.parametrize("what", ["states", "open", "ahead"])
async def test_a_run_whose_name_is_another_ones_there_is_not_deleted(world, what):
    """claim.py 1, deletion.py 1."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
        become_anothers(world, what)
        before = there(world)
        for dry_run in (True, False):
            error = await refused(runs.delete(RUN, dry_run=dry_run), "RUN_CONFLICT")
            assert error.message.startswith(f"run {RUN!r} was not deleted: the trainer at ")
        assert nothing_changed(world, before) and folders(world) == [RUN]


async def test_states_of_its_shorter_self_are_its_own(world):
    """claim.py 1."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
        world.trainer.disk[RUN, "kept"] = copy.deepcopy(world.trainer.disk[RUN, "final"])
        await completed(world, runs, steps=4)
        assert len({str(one.spec) for one in world.trainer.disk.values()}) > 1
        found = await runs.delete(RUN, dry_run=False)
        assert found.states and not states(world)


async def test_a_run_that_the_trainer_refused_has_no_states(world):
    """claim.py 2: CreateRun was RUN_CONFLICT, because the name is another's."""
    world.trainer.disk[STATE] = TrainerRun(ANOTHERS, applied=7)
    async with world.orchestrator() as runs:
        run = await completed(world, runs)
        assert "another spec" in run.error
        world.trainer.forget()  # which opens nothing that it refuses
        assert (await runs.delete(RUN, dry_run=True)).states == 0
        await runs.delete(RUN, dry_run=False)
        assert not world.trainer.deletions and not folders(world) and STATE in world.trainer.disk


@pytest.mark.parametrize("whose", ["ours", "another's"])
async def test_a_run_without_states_is_closed_where_its_end_was_not_heard(world, whose):
    """claim.py 2."""
    world.trainer.model_missing = True
    async with world.orchestrator() as runs:
        await completed(world, runs)
        (world.folder / "runs" / RUN / "untold").write_text("0\n")
        own = claim.of(RUN, runs.get(RUN))
        assert own is not None and not own.has_states
        world.trainer.runs[RUN] = TrainerRun(own.spec if whose == "ours" else ANOTHERS, applied=1)
        world.trainer.disk[STATE] = TrainerRun(world.trainer.runs[RUN].spec, applied=1)
        assert (await runs.delete(RUN, dry_run=True)).states == 0
        await runs.delete(RUN, dry_run=False)
        assert not folders(world) and STATE in world.trainer.disk
        assert (RUN in world.trainer.runs) == (whose == "another's")


@pytest.mark.parametrize("applied", [1, 999])
async def test_a_name_that_is_open_there_is_not_deleted_where_nobody_can_read_whose_it_is(world, applied):
    """claim.py 3."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
    damage(world)
    world.trainer.runs[RUN] = TrainerRun(ANOTHERS, applied=applied)
    before = there(world)
    async with world.orchestrator() as runs:
        for dry_run in (True, False):
            error = await refused(runs.delete(RUN, dry_run=dry_run), "RUN_CONFLICT")
            assert "it is open there, and nobody can read here whether it is this run" in error.message
        assert nothing_changed(world, before) and folders(world) == [RUN]
        world.trainer.forget()
        await runs.delete(RUN, dry_run=False)
        assert not folders(world) and not states(world)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(
    ("what", "damaged"),
    [("states", False), ("open", False), ("ahead", False), ("open", True), ("ahead", True)],
)
async def test_what_has_the_name_by_the_time_the_trainer_is_back_stays(world, what, damaged, restarted):
    """deletion.py 3 and 4; nobody can tell states from those of a run whose journal is damaged."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
    if damaged:
        damage(world)
    async with world.orchestrator() as runs:
        world.trainer.keeps_states = AWAY
        await refused(runs.delete(RUN, dry_run=False), "NOT_READY")
        if not restarted:
            become_anothers(world, what)
            before = there(world)
            world.trainer.keeps_states = None
            await until(lambda: not folders(world))
            assert nothing_changed(world, before)
    if restarted:
        become_anothers(world, what)
        before = there(world)
        world.trainer.keeps_states = None
        async with world.orchestrator() as runs:
            await until(lambda: not folders(world))
            assert nothing_changed(world, before) and not runs.all()


async def test_of_what_is_another_runs_nothing_is_left_to_be_deleted(world, monkeypatch):
    """deletion.py 3."""
    monkeypatch.setattr(deletion, "backoff_s", lambda tries: 3600.0)
    async with world.orchestrator() as runs:
        await completed(world, runs)
        world.trainer.keeps_states = AWAY
        await refused(runs.delete(RUN, dry_run=False), "NOT_READY")
        become_anothers(world, "states")
        world.trainer.keeps_states = None
        left = await runs.delete(RUN, dry_run=True)
        assert (left.states, left.states_bytes) == (0, 0) and left.journal_bytes
        assert await runs.delete(RUN, dry_run=False) == left
        assert not folders(world) and STATE in world.trainer.disk


@pytest.mark.parametrize("name", [f"{RUN} (copy)", f"{RUN}[1-9]", "another"])
async def test_a_copy_under_another_name_can_be_deleted(world, name):
    """claim.py 2: what the trainer has of that name is not its own."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
    shutil.copytree(world.folder / "runs" / RUN, world.folder / "runs" / name)
    world.trainer.disk[name, "of somebody"] = TrainerRun(ANOTHERS)
    before = there(world)
    async with world.orchestrator() as runs:
        found = await runs.delete(name, dry_run=True)
        assert found.journal_bytes and not found.states
        assert await runs.delete(name, dry_run=False) == found
        assert folders(world) == [RUN] and nothing_changed(world, before)
        assert not world.trainer.deletions


async def test_a_journal_that_cannot_be_read_now_is_not_deleted(world, monkeypatch):
    """claim.py 1: whose the states are it says when it can be read again."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
    damage(world)
    async with world.orchestrator() as runs:
        with monkeypatch.context() as away:

            def fails(folder):
                raise OSError(5, "Input/output error")

            away.setattr(claim, "Book", fails)
            error = await refused(runs.delete(RUN, dry_run=False), "NOT_READY")
            assert "was not deleted: [Errno 5] Input/output error; mend that" in error.message
        assert folders(world) == [RUN] and states(world) and not world.trainer.deletions


async def test_a_silent_trainer_is_told_as_one_that_is_not_ready(world):
    async with world.orchestrator() as runs:
        await completed(world, runs)
        world.trainer.keeps_states = QuartetError("DEADLINE", "it took too long", waited_for="the disk")
        await refused(runs.delete(RUN, dry_run=False), "NOT_READY")
