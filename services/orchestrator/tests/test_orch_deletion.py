"""Runs that are deleted: all of one, nothing of another, whatever dies on the way."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from orch_fakes import TrainerRun
from orch_world import RUN, assert_complete, serving, until
from quartet.errors import QuartetError, from_rpc
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import trainer_service_pb2 as tpb
from quartet_orchestrator import deletion, trainer_client

OTHER = "run.other"
AWAY = QuartetError("NOT_READY", "the disk is away")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(trainer_client, "READ_S", 0.5)
    monkeypatch.setattr(trainer_client, "CLOSE_S", 0.5)
    monkeypatch.setattr(deletion, "backoff_s", lambda tries: 0.05)


async def completed(world, runs, run_id: str = RUN, steps: int = 2):
    await runs.submit(run_id, world.toml(steps=steps, evals=0), dry_run=False)
    return await world.rest(runs, run_id)


async def refused(call, reason: str) -> QuartetError:
    with pytest.raises(QuartetError) as raised:
        await call
    assert raised.value.reason == reason, raised.value
    return raised.value


def folders(world) -> list[str]:
    return sorted(path.name for path in (world.folder / "runs").iterdir() if path.is_dir())


def states(world, run_id: str = RUN) -> int:
    return sum(key[0] == run_id for key in world.trainer.disk)


async def test_all_of_a_run_goes_and_its_name_is_free(world):
    """deletion.py 2 and 4."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
        await completed(world, runs, OTHER)
        kept = {key: one for key, one in world.trainer.disk.items() if key[0] == OTHER}
        there = states(world)
        look = await runs.delete(RUN, dry_run=True)
        assert (look.states, look.states_bytes) == (there, 1000 * there) and look.journal_bytes > 1000
        assert folders(world) == [RUN, OTHER] and states(world) == there, "a dry run deletes nothing"
        assert await runs.delete(RUN, dry_run=False) == look
        assert folders(world) == [OTHER] and not states(world)
        assert {key: one for key, one in world.trainer.disk.items() if key[0] == OTHER} == kept
        assert [run.run_id for run in runs.all()] == [OTHER]
        for call in (runs.delete(RUN, dry_run=False), runs.resume(RUN)):
            await refused(call, "RUN_UNKNOWN")
        world.trainer.applied_calls.clear()
        world.trainer.latest.clear()
        assert_complete(world, await completed(world, runs, steps=3), steps=3)
        assert set(world.trainer.applied_calls.values()) == {1}, "it began at its first call"
    async with world.orchestrator() as runs:
        assert {run.run_id for run in runs.all()} == {RUN, OTHER}


async def test_one_at_a_time_removes_what_is_left(world, monkeypatch):
    """deletion.py 5: whoever asked, and this process by itself; the folder is gone when the call returns."""
    plain, removing, at_once = deletion._remove_all, [], []

    def slow(folder, prefix):
        removing.append(prefix)
        at_once.append(len(removing))
        time.sleep(0.1)
        plain(folder, prefix)
        removing.pop()

    monkeypatch.setattr(deletion, "_remove_all", slow)
    monkeypatch.setattr(deletion, "backoff_s", lambda tries: 0.0)
    async with world.orchestrator() as runs:
        await completed(world, runs)
        await runs.delete(RUN, dry_run=False)
        assert folders(world) == []
        await until(lambda: len(at_once) == 2)
    assert at_once == [1, 1]


async def test_a_run_that_works_or_waits_is_not_deleted(world):
    """deletion.py 1."""
    async with world.orchestrator() as runs:
        world.host.max_delay_s = 5.0
        await runs.submit(RUN, world.toml(steps=6, evals=0), dry_run=False)
        await runs.submit(OTHER, world.toml(steps=6, evals=0), dry_run=False)
        await until(lambda: runs.status(RUN).phase == pb.RUN_PHASE_TRAINING)
        for run_id, phase in ((RUN, "TRAINING"), (OTHER, "PENDING")):
            for dry_run in (True, False):
                error = await refused(runs.delete(run_id, dry_run=dry_run), "INVALID_REQUEST")
                assert f"is {phase} and cannot be deleted; stop it first" in error.message
                assert f"with 'quartet stop {run_id}', and delete it once it is STOPPED" in error.message
                assert error.metadata["field"] == "run_id" and error.metadata["remedy"].startswith("stop it")
        runs.stop(OTHER)
        assert (await world.rest(runs, OTHER)).phase == pb.RUN_PHASE_STOPPED
        await runs.delete(OTHER, dry_run=False)
        assert folders(world) == [RUN]
        runs.stop(RUN)
        assert runs.status(RUN).phase == pb.RUN_PHASE_STOPPING
        error = await refused(runs.delete(RUN, dry_run=False), "INVALID_REQUEST")
        stops = "it stops after the step under way; delete it once it is STOPPED"
        assert error.message == f"run {RUN!r} is STOPPING and cannot be deleted; {stops}"


@pytest.mark.parametrize("reason", ["NOT_READY", "NOT_IMPLEMENTED"])
async def test_what_the_trainer_cannot_do_now_changes_nothing(world, reason):
    """deletion.py 1: one that is away, or of an earlier release."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
        there = states(world)
        if reason == "NOT_READY":
            await world.kill("trainer")
        world.trainer.cannot_delete = reason == "NOT_IMPLEMENTED"
        error = await refused(runs.delete(RUN, dry_run=False), reason)
        assert error.message.startswith(f"run {RUN!r} was not deleted: the trainer at ")
        assert folders(world) == [RUN] and states(world) == there
        assert runs.status(RUN).phase == pb.RUN_PHASE_COMPLETED
        if reason == "NOT_READY":
            await world.serve("trainer")
        await runs.submit(RUN, world.toml(steps=4, evals=0), dry_run=False)
        assert_complete(world, await world.rest(runs))


async def test_a_trainer_that_goes_away_meanwhile_deletes_when_it_is_back(world):
    """deletion.py 3: the name is not free before."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
        world.trainer.keeps_states = AWAY
        error = await refused(runs.delete(RUN, dry_run=False), "NOT_READY")
        assert "is deleted here, and what it has at the trainer is not yet: the disk is away" in error.message
        assert folders(world) == [f"@deleting-{RUN}"] and states(world)
        assert not runs.all()
        submit = runs.submit(RUN, world.toml(steps=3, evals=0), dry_run=False)
        assert "until then the name is not free" in (await refused(submit, "NOT_READY")).message
        await refused(runs.delete(RUN, dry_run=False), "NOT_READY")
        left = await runs.delete(RUN, dry_run=True)
        assert left.states == states(world) and left.journal_bytes > 1000, "what is left is told"
        tried = len(world.trainer.deletions)
        await until(lambda: len(world.trainer.deletions) > tried + 2)
        world.trainer.keeps_states = None
        await until(lambda: not folders(world))
        assert not states(world)
        world.trainer.latest.clear()
        assert_complete(world, await completed(world, runs, steps=3), steps=3)


async def test_whoever_submits_the_name_again_has_it_done(world, monkeypatch):
    """deletion.py 3: and so has whoever deletes it again."""
    monkeypatch.setattr(deletion, "backoff_s", lambda tries: 3600.0)
    async with world.orchestrator() as runs:
        for again in ("submit", "delete"):
            await completed(world, runs)
            world.trainer.keeps_states = AWAY
            await refused(runs.delete(RUN, dry_run=False), "NOT_READY")
            world.trainer.keeps_states = None
            world.trainer.latest.clear()
            if again == "submit":
                assert_complete(world, await completed(world, runs, steps=3), steps=3)
            await runs.delete(RUN, dry_run=False)
            assert not folders(world) and not states(world)
            world.trainer.latest.clear()


@pytest.mark.parametrize("died", ["before", "states", "journal"])
async def test_what_a_kill_left_the_next_process_finishes(world, died):
    """deletion.py 2 and 3: killed before the name was taken away, before the states went, or after."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
        await completed(world, runs, OTHER)
    root: Path = world.folder / "runs"
    if died == "states":
        (root / RUN).rename(root / f"@deleting-{RUN}")
    if died == "journal":
        (root / RUN).rename(root / f"@deleted-{RUN}@123")
        world.trainer.disk = {key: one for key, one in world.trainer.disk.items() if key[0] == OTHER}
    async with world.orchestrator() as runs:
        if died == "before":
            assert runs.status(RUN).phase == pb.RUN_PHASE_COMPLETED
            await runs.delete(RUN, dry_run=False)
        await until(lambda: folders(world) == [OTHER])
        assert not states(world) and states(world, OTHER)
        assert [run.run_id for run in runs.all()] == [OTHER]


async def test_a_run_that_the_trainer_still_has_open_is_closed_and_not_saved(world):
    """deletion.py 3: its end was not told, because the trainer was away."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
        applied = runs.get(RUN).state.applied_seq_id
        spec = world.trainer.disk[RUN, "final"].spec
        world.trainer.runs[RUN] = TrainerRun(spec, applied=applied)
        await runs.delete(RUN, dry_run=False)
        assert RUN not in world.trainer.runs and not states(world)


async def test_a_run_that_somebody_else_trained_asks_no_trainer(world):
    """deletion.py 4."""
    await world.serve("policy")
    async with world.orchestrator() as runs:
        toml = world.toml(steps=2, evals=0, external_trainer="true")
        toml = toml.replace("[ckpt]\ninterval = 2\n", "").replace("[checks]\nverify_logprobs = true", "")
        await runs.submit(RUN, toml, dry_run=False)
        world.trainer.disk[RUN, "of somebody"] = TrainerRun(tpb.RunSpec())
        runs.stop(RUN)
        await world.rest(runs)
        found = await runs.delete(RUN, dry_run=False)
        assert (found.states, world.trainer.deletions) == (0, []) and found.journal_bytes
        assert not folders(world) and states(world)


async def test_a_run_whose_journal_is_damaged_can_be_deleted(world):
    async with world.orchestrator() as runs:
        await completed(world, runs)
    (segment,) = (world.folder / "runs" / RUN).glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    async with world.orchestrator() as runs:
        assert runs.status(RUN).phase == pb.RUN_PHASE_FAILED and "damaged" in runs.status(RUN).error
        await runs.delete(RUN, dry_run=False)
        assert not folders(world) and not states(world) and not runs.all()


async def test_a_disk_that_takes_no_change_leaves_the_run_as_it_was(world, monkeypatch):
    """deletion.py 2."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
        there = states(world)
        with monkeypatch.context() as full:

            def fails(*_):
                raise OSError(30, "Read-only file system")

            full.setattr(deletion.Path, "rename", fails)
            error = await refused(runs.delete(RUN, dry_run=False), "NOT_READY")
            assert "is as it was: [Errno 30] Read-only file system; mend that" in error.message
        assert states(world) == there
        await runs.submit(RUN, world.toml(steps=4, evals=0), dry_run=False)
        assert_complete(world, await world.rest(runs))


async def test_who_resumes_it_meanwhile_gets_it_or_an_error_and_nothing_in_between(world):
    async with world.orchestrator() as runs:
        world.host.max_delay_s = 5.0
        await runs.submit(RUN, world.toml(steps=6, evals=0), dry_run=False)
        runs.stop(RUN)
        await world.rest(runs)
        world.host.max_delay_s = 0.004
        world.trainer.checked.clear()
        world.trainer.checks_at = asyncio.Event()
        resuming = asyncio.create_task(runs.resume(RUN))
        await until(lambda: world.trainer.checked)
        await runs.delete(RUN, dry_run=False)
        world.trainer.checks_at.set()
        await refused(resuming, "RUN_UNKNOWN")
        assert not runs.all() and not folders(world) and RUN not in world.trainer.runs


async def test_deleted_twice_at_once_it_is_deleted_once(world):
    """deletion.py 5: who comes later is told what is left, or that there is no such run."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
        calls = [runs.delete(RUN, dry_run=False) for _ in range(3)]
        first, *rest = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, pb.DeleteRunResponse) and first.journal_bytes
        refusals = [one for one in rest if isinstance(one, Exception)]
        assert all(isinstance(one, QuartetError) and one.reason == "RUN_UNKNOWN" for one in refusals)
        assert world.trainer.deletions.count((RUN, False)) == 1
        assert not folders(world) and not states(world)


async def test_a_full_disk_keeps_no_run_from_going(world):
    """Deleting is what makes room: SQLite finds none for the index's log."""
    async with world.orchestrator() as runs:
        await completed(world, runs)
        (world.folder / "runs" / RUN / "index.sqlite-wal").mkdir()
        assert (await runs.delete(RUN, dry_run=False)).states
        assert not folders(world) and not states(world)


async def test_files_that_vanish_while_they_are_counted_are_none(world, monkeypatch):
    async with world.orchestrator() as runs:
        await completed(world, runs)
        whole = (await runs.delete(RUN, dry_run=True)).journal_bytes
        found = deletion.Path.rglob
        with monkeypatch.context() as walking:
            gone = world.folder / "index.sqlite-wal"
            walking.setattr(deletion.Path, "rglob", lambda path, pattern: [*found(path, pattern), gone])
            assert (await runs.delete(RUN, dry_run=True)).journal_bytes == whole

            def fails(path, pattern):
                raise OSError(5, "Input/output error")

            walking.setattr(deletion.Path, "rglob", fails)
            error = await refused(runs.delete(RUN, dry_run=False), "NOT_READY")
            assert "was not deleted: [Errno 5] Input/output error; mend that" in error.message
        assert folders(world) == [RUN] and states(world)


async def test_by_the_rpc_and_who_watches_it_is_told(world):
    async with serving(world) as stub:
        await stub.SubmitRun(
            pb.SubmitRunRequest(run_id=RUN, config_toml=world.toml(steps=2, evals=0)), timeout=30
        )
        async for _ in stub.WatchRun(pb.WatchRunRequest(run_id=RUN)):
            pass
        look = await stub.DeleteRun(pb.DeleteRunRequest(run_id=RUN, dry_run=True))
        assert look.journal_bytes and await stub.DeleteRun(pb.DeleteRunRequest(run_id=RUN)) == look
        for call in (
            stub.GetRunStatus(pb.GetRunStatusRequest(run_id=RUN)),
            stub.WatchRun(pb.WatchRunRequest(run_id=RUN)).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            assert from_rpc(raised.value).reason == "RUN_UNKNOWN"
