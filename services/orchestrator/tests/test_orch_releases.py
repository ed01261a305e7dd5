"""Services of different releases: what a newer one wrote, and what an older one refuses, costs no run."""

from __future__ import annotations

import shutil

import pytest
from orch_world import RUN, assert_complete
from quartet.errors import QuartetError
from quartet.v1 import journal_pb2 as jpb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1.journal_pb2 import JournalRecord
from quartet_orchestrator import outage, training
from quartet_orchestrator.book import Book
from quartet_orchestrator.journal import Journal
from quartet_orchestrator.segments import Segments

# Field 999, a varint: 1.
OF_A_NEWER_RELEASE = b"\xb8\x3e\x01"


async def stopped_runs(world, *names: str) -> None:
    """Runs that are stopped in the middle, and the files of a closed orchestrator."""
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        for name in names:
            await runs.submit(name, world.toml(steps=6), dry_run=False)
            while runs.get(name).state.step < 2:
                await runs.get(name).changed()
            runs.stop(name)
            await world.rest(runs, name)


@pytest.mark.parametrize("newer", [JournalRecord(), JournalRecord(dispatched={"group": 0})])
async def test_a_journal_of_a_newer_release_is_set_aside_whole_and_goes_on_there(world, newer):
    """shelf.py 1, records.py 1: a kind of record, and a field of one, that this release does not know."""
    await stopped_runs(world, "new", "old")
    folder = world.folder / "runs" / "new"
    shutil.copytree(folder, world.folder / "kept")
    segments = Segments(folder, 64 << 20)
    last = Journal(world.folder / "kept")
    newer.number = last.last_number + 1
    last.close()
    if newer.HasField("dispatched"):
        newer.dispatched.MergeFromString(OF_A_NEWER_RELEASE)
        said = "GroupDispatched, field 999"
        segments.append(newer.SerializeToString())
    else:
        said = "JournalRecord, field 999"
        segments.append(newer.SerializeToString() + OF_A_NEWER_RELEASE)
    segments.syncer()()
    segments.close()
    data = (folder / "000001.seg").read_bytes()
    async with world.orchestrator() as runs:
        error = runs.status("new").error
        assert said in error and "newer release" in error and "damaged" not in error
        with pytest.raises(QuartetError) as caught:
            await runs.resume("new")
        assert caught.value.reason == "NOT_IMPLEMENTED"
        await runs.resume("old")
        assert (await world.rest(runs, "old")).phase == pb.RUN_PHASE_COMPLETED
    assert (folder / "000001.seg").read_bytes() == data


async def test_what_a_newer_trainer_answers_beside_is_no_newer_journal(world):
    """records.py 1"""
    await stopped_runs(world, "run")
    book = Book(world.folder / "runs" / "run")
    book.journal.wake()
    answer = tpb.PublishWeightsResponse.FromString(OF_A_NEWER_RELEASE)
    book.write(call=jpb.CallApplied(seq_id=book.state.applied_seq_id + 1, publish=answer))
    book.close()
    async with world.orchestrator() as runs:
        assert runs.status("run").phase == pb.RUN_PHASE_STOPPED


REFUSALS = [
    # A call that has a setting which an older trainer does not know.
    ("ForwardBackward", QuartetError("NOT_IMPLEMENTED", "LossSpec, field 999")),
    # States that a newer one wrote; settings whose defaults were others; a volume that is not mounted.
    ("CreateRun", QuartetError("INVALID_CONFIG", "was saved by another release", key="state_dir")),
    ("CreateRun", QuartetError("RUN_CONFLICT", "exists with another spec", run_id=RUN)),
    ("CreateRun", QuartetError("INTERNAL", "internal fault")),
]


@pytest.mark.parametrize(("rpc", "refusal"), REFUSALS)
async def test_a_trainer_of_another_release_stops_a_run_and_does_not_end_it(world, monkeypatch, rpc, refusal):
    """training.py 6, outage.py 2: brought back to the release that it had, it goes on."""
    monkeypatch.setattr(training, "GUARD_S", 0.05)
    monkeypatch.setattr(outage, "FAULT_PAUSE_S", 0.01)
    world.trainer.delay_s = 0.02
    plain = getattr(world.trainer, rpc)

    async def refuses(*_):
        raise refusal

    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8), dry_run=False)
        while runs.get(RUN).state.step < 2:
            await runs.get(RUN).changed()
        await world.kill("trainer")
        monkeypatch.setattr(world.trainer, rpc, refuses)
        await world.serve("trainer")
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_STOPPED
        assert refusal.message in run.error and "resume the run" in run.error
        assert not run.ledger.discarded
        await world.kill("trainer")
        monkeypatch.setattr(world.trainer, rpc, plain)
        await world.serve("trainer")
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=8)


@pytest.mark.parametrize("reason", ["ENVIRONMENT_UNKNOWN", "INVALID_CONFIG", "NOT_IMPLEMENTED"])
async def test_a_host_without_the_environment_any_more_stops_a_run(world, monkeypatch, reason):
    """sampling.py 7: an image was built without its package, or with a version that refuses the arguments."""
    world.trainer.delay_s = 0.02
    plain = world.host.RunRollouts

    async def refuses(*_):
        raise QuartetError(reason, "the environment is not what it was")
        yield

    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=8), dry_run=False)
        while runs.get(RUN).state.step < 2:
            await runs.get(RUN).changed()
        await world.kill("host")
        monkeypatch.setattr(world.host, "RunRollouts", refuses)
        await world.serve("host")
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_STOPPED
        assert "is not what it was" in run.error and "resume the run" in run.error
        await world.kill("host")
        monkeypatch.setattr(world.host, "RunRollouts", plain)
        await world.serve("host")
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=8)


async def test_a_failure_of_a_kind_that_is_new_is_a_failure_like_any_other(world):
    """rollouts.py 3: a newer host says why a member failed."""
    world.host.kind, world.host.failing_tasks = 99, set(range(0, 50, 3))
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(evals=0), dry_run=False)
        run = await world.rest(runs)
    assert_complete(world, run)
    assert run.ledger.discarded["failed:99"]
