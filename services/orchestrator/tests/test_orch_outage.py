"""Services that are away are waited for, within the run's patience; passing faults pass."""

from __future__ import annotations

import asyncio
import re
import time
from unittest.mock import Mock

import pytest
from orch_world import RUN, assert_complete, events
from quartet.errors import QuartetError
from quartet.v1 import common_pb2 as cpb
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb
from quartet_orchestrator import outage, training
from quartet_orchestrator.envhosts import SignOfLife
from quartet_orchestrator.foreign import ForeignTraining
from quartet_orchestrator.keeping_up import KeepingUp
from quartet_orchestrator.permits import Permits
from quartet_orchestrator.sampling import Sampling


async def test_a_model_that_answers_nobody_is_an_outage(world, monkeypatch):
    monkeypatch.setattr(outage, "NOTE_AFTER_S", 0.05)
    world.host.kind, world.host.reason = rpb.FAILURE_KIND_MODEL, cpb.ERROR_REASON_NOT_READY
    world.host.failing_tasks = set(range(50))
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(evals=0), dry_run=False)
        book = runs.get(RUN)
        while not any("is away" in record.note.message for record in book.journal.select("note")):
            await book.changed()
        world.host.failing_tasks = set()
        run = await world.rest(runs)
        notes = [r.note.message for r in await events(runs) if r.WhichOneof("kind") == "note"]
    assert_complete(world, run)
    assert not run.ledger.discarded
    assert any("is away" in note for note in notes) and any("is back" in note for note in notes)


@pytest.mark.parametrize("faults", [outage.MAX_FAULTS, outage.MAX_FAULTS + 1])
async def test_a_fault_of_the_trainer_may_pass(world, monkeypatch, faults):
    """outage.py 2: also where it is asked to create the run."""
    monkeypatch.setattr(outage, "FAULT_PAUSE_S", 0.01)
    world.trainer.faults = faults
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
        if faults > outage.MAX_FAULTS:
            assert run.phase == pb.RUN_PHASE_STOPPED
            assert f"the trainer failed at it {faults} times in a row: no memory left" in run.error
            await runs.resume(RUN)
            run = await world.rest(runs)
    assert_complete(world, run)


async def test_a_token_that_is_replaced_at_the_trainer_first_is_waited_for(world, monkeypatch):
    """outage.py 1: not the end of a run, for good."""
    monkeypatch.setattr(training, "GUARD_S", 0.01)
    find, refused = world.trainer._find, []

    def locked(run_id):
        if world.trainer.applied_calls[6] and len(refused) < 3:
            refused.append(run_id)
            raise QuartetError("UNAUTHENTICATED", "the token is none of this service's")
        return find(run_id)

    monkeypatch.setattr(world.trainer, "_find", locked)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        run = await world.rest(runs)
    assert_complete(world, run)
    assert len(refused) == 3


@pytest.mark.parametrize(
    ("absence", "waiting", "ended"),
    [
        (
            outage.Absence.AWAY,
            "the host is away, waiting for it: no",
            "has been away for 9 s (patience_seconds = 8): no; start",
        ),
        (
            outage.Absence.UNLOADED,
            "the host lacks what it is asked for, waiting for it: no",
            "has lacked what it is asked for for 9 s (patience_seconds = 8): no; then resume the run",
        ),
        (
            outage.Absence.HINDERED,
            "the host answers and cannot go on, waiting for it: no",
            "could not go on for 9 s (patience_seconds = 8): no; then resume the run",
        ),
    ],
)
def test_what_a_service_lacks_is_not_the_service(absence, waiting, ended):
    now, notes = [0.0], []
    one = outage.Outage("the host", 8.0, lambda note, **more: notes.append(note), lambda: now[0])
    for now[0] in (0.0, 5.0):
        one.failed("no", absence)
    assert notes == [waiting] and one.trouble.startswith(waiting)
    now[0] = 9.0
    with pytest.raises(outage.RunInterrupted, match=re.escape(ended)):
        one.failed("no", absence)


async def test_a_trainer_with_a_full_disk_is_not_away(world):
    """trouble.py 2: it is not started again for that."""
    refusals, save = iter(range(3)), world.trainer.SaveState

    async def full(request, context):
        if next(refusals, None) is None:
            return await save(request, context)
        raise QuartetError("NOT_READY", "state-0 cannot be written: no space; make room", remedy="make room")

    await world.kill("trainer")
    world.trainer.SaveState = full
    await world.serve("trainer")
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        doing = ""
        async with asyncio.timeout(60):
            while "cannot be written" not in doing:
                await asyncio.sleep(0.005)
                doing = runs.status(RUN).doing
        assert "the trainer answers and cannot go on, waiting for it: state-0 cannot be written" in doing
        assert_complete(world, await world.rest(runs), steps=6)


async def test_a_service_away_for_too_long_stops_the_run_resumable(world):
    """Invariant 7."""
    world.patience_s = 2.0  # longer than a channel takes to connect again
    await world.kill("host")
    services = world.services()
    await world.serve("host")
    await services.close()
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        await world.kill("host")
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_STOPPED and "the environment host has been away" in run.error
        await world.serve("host")
        world.have_patience(60.0)  # that it is back may be seen late on a busy machine
        assert (await runs.resume(RUN)).phase == pb.RUN_PHASE_PENDING
        run = await world.rest(runs)
        assert_complete(world, run)
        assert run.error == ""


async def test_an_answer_to_anybody_ends_the_outage_for_everybody():
    """outage.py 1, 3 and 4."""
    now, said = [0.0], []
    service = outage.Outage(
        "the host", 10.0, lambda message, *, warning=False: said.append(message), lambda: now[0]
    )
    for at in (0.0, 1.0, 9.0, 9.5):
        now[0] = at
        service.failed("refused")
    service.answered()
    service.answered()
    assert said == ["the host is away, waiting for it: refused", "the host is back after 10 s"]
    for at in (15.0, 25.0):
        now[0] = at
        service.failed("refused")
    now[0] = 25.1
    with pytest.raises(outage.RunInterrupted, match="away for 10 s"):
        service.failed("refused")


async def test_a_service_that_is_started_beside_the_orchestrator_is_not_away_yet():
    """outage.py 3: after a launcher was killed, all of them begin anew, and the run goes on by itself."""
    now, said = [100.0], []

    def note(message, *, warning=False):
        said.append(message)

    def met(at, *, answers=False):
        service = outage.Outage("the trainer", 300.0, note, lambda: now[0], started_at=100.0)
        said.clear()
        for at_s in (101.0, 110.0, at):
            now[0] = at_s
            service.failed("refused")
        assert service.trouble.startswith("the trainer is away"), "whoever asks is told at once"
        if answers:
            service.answered()
        return service

    met(159.0, answers=True)
    assert said == [], "it had to load its model"
    met(160.0, answers=True)
    assert said == ["the trainer is away, waiting for it: refused", "the trainer is back after 59 s"]
    service = met(120.0, answers=True)
    for now[0] in (121.0, 124.0):
        service.failed("refused")
    assert said == ["the trainer is away, waiting for it: refused"], "it was there, and is not"


async def test_a_host_that_delivers_to_one_group_is_not_away_for_another(monkeypatch):
    """outage.py 4: a stream of rollouts is an answer, however long its group takes."""
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.02)
    delivered, now = [], [0.0]

    class Hosts:
        async def run(self, asked):
            if not asked.request_id.startswith("slow") and len(delivered) < 12:
                raise QuartetError("OVERLOADED", "4096 rollouts are in flight; the limit is 4096")
            for member in list(asked.members):
                now[0] += 0.05
                await asyncio.sleep(0.05)
                one = rpb.Rollout(member=member)
                one.samples.add(token_ids=[5, 6], logprobs=[-1.0]).spans.add(start=1, length=1)
                yield one

    def note(message, *, warning=False):
        pass

    away = outage.Outage("the host", 0.3, note, lambda: now[0]), outage.Outage("the model", 60.0, note)
    sampling = Sampling(Hosts(), Permits(100), *away)

    async def sampled(name, members):
        return await sampling.complete(
            epb.RunRolloutsRequest(request_id=name),
            range(members),
            lambda one: delivered.append(one.member) or True,
            all_or_nothing=True,
        )

    async with asyncio.timeout(60):
        assert await asyncio.gather(sampled("slow", 12), sampled("other", 4)) == [{}, {}]
    assert len(delivered) == 16


def by_hand(patience_s=10.0):
    """An outage, its clock, and what a person read of it."""
    now, said = [0.0], []
    note = lambda message, *, warning=False: said.append(message)  # noqa: E731
    return outage.Outage("the service", patience_s, note, lambda: now[0]), now, said


async def test_a_stream_that_beats_is_a_sign_of_life_however_long_its_rollouts_take():
    """outage.py 1 and 4, envhosts.py 2."""
    host, now, _ = by_hand()
    beat, beaten = asyncio.Event(), asyncio.Event()

    class Hosts:
        asked = 0

        async def run(self, _):
            self.asked += 1
            if self.asked in (1, 3):
                raise QuartetError("NOT_READY", "connection reset")
            await beat.wait()
            yield SignOfLife("h1")
            beaten.set()
            await asyncio.Event().wait()

    hosts = Hosts()
    sampling = Sampling(hosts, Permits(8), host, by_hand()[0])

    def sampled():
        return asyncio.create_task(
            sampling.complete(epb.RunRolloutsRequest(), [0], lambda _: True, all_or_nothing=True)
        )

    first = sampled()
    async with asyncio.timeout(60):
        while hosts.asked < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        now[0] = 5.0
        beat.set()
        await beaten.wait()
        now[0] = 900.0
        second = sampled()
        while hosts.asked < 4:
            assert not second.done(), "one failure is no outage"
            await asyncio.sleep(0.01)
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)


@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_model_that_gave_tokens_before_it_failed_was_there_meanwhile(tokens):
    """outage.py 4."""
    model, now, _ = by_hand()

    class Hosts:
        async def run(self, _):
            now[0] += 900.0
            failure = rpb.RolloutFailure(kind=rpb.FAILURE_KIND_MODEL, reason="ERROR_REASON_NOT_READY")
            rollout = rpb.Rollout(member=0, failure=failure)
            if tokens:
                rollout.samples.add(token_ids=[5, 6], logprobs=[-1.0]).spans.add(start=1, length=1)
            yield rollout

    model.failed("refused")
    now[0] += 1.0
    sampled = Sampling(Hosts(), Permits(1), by_hand()[0], model).complete(
        epb.RunRolloutsRequest(), [0], lambda _: True, all_or_nothing=True
    )
    if tokens:
        assert set(await sampled) == {0}, "after its second failure: the member's own time is over"
    else:
        with pytest.raises(outage.RunInterrupted, match="has been away for 901 s"):
            await sampled


@pytest.mark.parametrize("reason", ["INTERNAL", "INVALID_REQUEST"])
async def test_an_error_that_is_no_absence_is_an_answer(monkeypatch, reason):
    """outage.py 4."""
    monkeypatch.setattr(outage, "FAULT_PAUSE_S", 0.0)
    service, now, _ = by_hand()

    async def attempt():
        raise QuartetError(reason, "no")

    service.failed("refused")
    now[0] = 9.0
    with pytest.raises((QuartetError, outage.RunInterrupted), match="no"):
        await service.through(attempt)
    now[0] = 900.0
    service.failed("refused")


async def test_faults_are_counted_in_a_row(monkeypatch):
    """outage.py 2: what a service does while it comes and goes is not one fault that stays."""
    monkeypatch.setattr(outage, "FAULT_PAUSE_S", 0.0)
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.0)
    to_come = [*["INTERNAL"] * outage.MAX_FAULTS, "NOT_READY"] * 2

    async def attempt():
        if to_come:
            raise QuartetError(to_come.pop(0), "not now")
        return "done"

    assert await by_hand()[0].through(attempt) == "done"


@pytest.mark.parametrize("known_by", ["rpc", "grpc_code"])
@pytest.mark.parametrize("lasts_s", [outage.STRANGER_S - 1, outage.STRANGER_S])
async def test_another_service_at_the_address_is_no_other_release_for_a_while(monkeypatch, lasts_s, known_by):
    """outage.py 2: its own is another by now; what went before the service was away does not count."""
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.0)
    service, now, notes = by_hand(patience_s=1000.0)
    stranger = QuartetError("NOT_IMPLEMENTED", "there is no method here", **{known_by: "x"})
    to_come = [(0.0, stranger), (outage.STRANGER_S, QuartetError("NOT_READY", "refused"))]
    to_come += [(0.0, stranger), (lasts_s, stranger)]

    async def attempt():
        if to_come:
            pause_s, error = to_come.pop(0)
            now[0] += pause_s
            raise error
        return "done"

    if lasts_s < outage.STRANGER_S:
        assert await service.through(attempt) == "done"
        assert any("is away, waiting for it" in note for note in notes)
    else:
        with pytest.raises(outage.RunInterrupted, match="there is no method here; then resume the run"):
            await service.through(attempt)


async def test_a_setting_that_the_service_does_not_know_is_told_at_once():
    """outage.py 2: it has the method, and is there."""
    service, _, notes = by_hand(patience_s=1000.0)

    async def attempt():
        raise QuartetError("NOT_IMPLEMENTED", "was asked with LossSpec, field 16", rpc="x", field="f")

    with pytest.raises(outage.RunInterrupted, match="LossSpec, field 16; then resume the run"):
        await service.through(attempt)
    assert not notes


@pytest.mark.parametrize(
    ("took_s", "error", "there"),
    [
        (900.0, QuartetError("NOT_READY", "reset", grpc_code="UNAVAILABLE"), True),
        (30.0, QuartetError("NOT_READY", "frozen", grpc_code="UNAVAILABLE"), False),
        (900.0, QuartetError("NOT_READY", "no memory for this batch"), False),
        (900.0, QuartetError("DEADLINE", "no answer", grpc_code="DEADLINE_EXCEEDED"), False),
    ],
)
async def test_a_long_call_whose_connection_broke_was_with_a_service_that_was_there(took_s, error, there):
    """outage.py 4."""
    service, now, _ = by_hand()
    service.failed("refused")
    now[0] = 1.0
    with pytest.raises(QuartetError), service.calling():
        now[0] += took_s
        raise error
    if there:
        service.failed("refused")
    else:
        with pytest.raises(outage.RunInterrupted, match=f"has been away for {took_s + 1:.0f} s"):
            service.failed("refused")


async def test_time_in_which_the_orchestrator_did_not_run_is_nobodys_absence(monkeypatch):
    """outage.py 1, keeping_up.py 2, foreign.py 5: `docker compose pause`; looks are due first on waking."""
    note, said = lambda message, *, warning=False: None, QuartetError("NOT_READY", "fetching")

    async def behind(version):
        raise said

    async def unknown(version):
        return ""

    service = outage.Outage("the trainer", 60.0, note)
    keeping_up = KeepingUp(behind, behind, unknown, dict, 60.0, note)
    foreign = ForeignTraining(Mock(state=Mock(batches={})), None, behind, 60.0)
    monotonic = time.monotonic
    for slept_s in (0, 3600, 7200):
        monkeypatch.setattr(time, "monotonic", lambda slept_s=slept_s: monotonic() + slept_s)
        service.failed("refused")
        await keeping_up.look(1)
        foreign._check_patience()


async def test_how_long_a_service_was_away_does_not_count_the_call_that_it_answered():
    """outage.py 3 and 4."""
    service, now, said = by_hand()
    for at in (0.0, 3.0):
        now[0] = at
        service.failed("refused")

    async def attempt():
        with service.calling():
            now[0] += 3600.0

    now[0] = 4.0
    await service.through(attempt)
    assert said[1] == "the service is back after 4 s"
