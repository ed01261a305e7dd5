"""Inference that does not come to the trainer's versions: a run says so, and does not wait for ever."""

from __future__ import annotations

import asyncio

import pytest
from orch_world import RUN, assert_complete, events
from quartet.errors import QuartetError
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator import keeping_up, training
from quartet_orchestrator.keeping_up import NOTE_AFTER_S, SHOWN_AFTER_S, STANDING_S, KeepingUp
from quartet_orchestrator.outage import RunFailed, RunInterrupted
from quartet_orchestrator.policies import Standing
from quartet_orchestrator.trainer_client import TrainerClient

PATIENCE_S = 600.0


class Replicas:
    """What serves the versions up to one, or is away, asked by a clock that the test turns."""

    def __init__(self, newest: int = 0) -> None:
        self.newest = newest
        self.asked: list[int] = []
        self.notes: list[str] = []
        self.now = 0.0
        self.away = self.said_of_all = ""
        self.standing: dict[str, Standing] = {}
        self.keeping_up = KeepingUp(
            self.serving,
            self.still_serving,
            self.never,
            self.stand,
            PATIENCE_S,
            self.note,
            lambda: self.now,
        )

    async def serving(self, version: int) -> None:
        self.asked.append(version)
        if version > self.newest:
            raise QuartetError("NOT_READY", f"r1: version {self.newest}; nothing newer comes to it: torn")

    async def still_serving(self, version: int) -> None:
        if self.away:
            raise QuartetError("NOT_READY", self.away)

    async def never(self, version: int) -> str:
        return self.said_of_all

    async def stand(self) -> dict[str, Standing]:
        return self.standing

    def note(self, message: str, *, warning: bool = False) -> None:
        self.notes.append(message)

    async def look(self, version: int, after_s: float = 0.0) -> None:
        self.now += after_s
        await self.keeping_up.look(version)


async def test_one_note_says_why_and_one_when_it_is_over():
    """keeping_up.py 1"""
    replicas = Replicas(newest=3)
    for _ in range(3):
        await replicas.look(3, after_s=100)
    assert replicas.asked == [3] and not replicas.notes
    await replicas.look(4, after_s=100)
    await replicas.look(4, after_s=NOTE_AFTER_S - 1)
    assert not replicas.notes
    for _ in range(2):
        await replicas.look(4, after_s=1)
    assert replicas.notes == [
        "waits for inference to serve version 4: r1: version 3; nothing newer comes to it: torn"
    ]
    replicas.newest = 4
    for _ in range(2):
        await replicas.look(4, after_s=1)
    assert replicas.notes[1:] == ["inference serves version 4 after 32 s"]


async def test_a_replica_that_goes_on_refusing_is_told_of_once_while_another_serves_the_run():
    """keeping_up.py 4"""
    replicas = Replicas(newest=9)
    well, refuses = Standing(True, ""), Standing(False, "its adapter could not be loaded: no room")
    replicas.standing = {"r1": well, "r2": refuses, "r3": Standing(False, "")}
    for _ in range(2):
        await replicas.look(3, after_s=STANDING_S)
    assert not replicas.notes and not replicas.keeping_up.refusing, "it may be on its way"
    for version in (3, 4, 5, 6):
        await replicas.look(version, after_s=STANDING_S)
    told = f"inference at r2 does not serve this run, others do without it: {refuses.why}"
    assert replicas.notes == [told] and replicas.keeping_up.refusing == [told]
    assert not replicas.keeping_up.trouble, "the run does not wait for it"
    replicas.standing["r2"] = Standing(False, "")
    for _ in range(4):
        await replicas.look(6, after_s=STANDING_S)
    replicas.standing["r2"] = refuses
    await replicas.look(7, after_s=STANDING_S)
    assert replicas.notes == [told], "it is told again where it was over"
    replicas.standing["r2"] = well
    await replicas.look(8, after_s=STANDING_S)
    assert replicas.notes[1:] == ["inference at r2 serves this run after 110 s"]
    replicas.standing["r2"] = Standing(True, "version 9 could not be taken: torn")
    for _ in range(5):
        await replicas.look(9, after_s=STANDING_S)
    assert replicas.notes[2:] == [
        "inference at r2 is behind with this run, others do without it: version 9 could not be taken: torn"
    ]
    del replicas.standing["r2"]
    await replicas.look(9, after_s=STANDING_S)
    assert not replicas.keeping_up.refusing and len(replicas.notes) == 3, "it has left"


async def test_what_replicas_say_while_the_trainer_is_brought_up_again_is_not_asked():
    """keeping_up.py 4: they have not found it yet."""
    replicas = Replicas(newest=9)
    replicas.standing = {"r2": Standing(True, "versions are not announced")}
    for _ in range(8):
        await replicas.look(3, after_s=STANDING_S - 1)
        assert not replicas.keeping_up.is_due
        replicas.keeping_up.interrupted()
        assert replicas.keeping_up.is_due, "until somebody has looked"
    assert not replicas.notes
    for newest, version, is_due in ((9, 10, True), (10, 10, False), (10, 11, False)):
        replicas.newest = newest
        await replicas.look(version)
        assert replicas.keeping_up.is_due is is_due, "a new one is on its way to them in every step"


async def test_whoever_asks_is_told_sooner_than_the_note_and_not_of_every_version():
    """keeping_up.py 1"""
    replicas = Replicas(newest=3)
    assert replicas.keeping_up.trouble == ""
    await replicas.look(4)
    await replicas.look(4, after_s=SHOWN_AFTER_S - 1)
    assert replicas.keeping_up.trouble == "" and 1 < SHOWN_AFTER_S < 10 < NOTE_AFTER_S
    replicas.now += 1
    assert replicas.keeping_up.trouble == (
        "waits for inference to serve version 4: r1: version 3; nothing newer comes to it: torn "
        "(for 5 s; see to it, or the run stops, resumable, after patience_seconds = 600)"
    )
    replicas.newest = 4
    await replicas.look(4)
    assert replicas.keeping_up.trouble == "" and not replicas.notes
    await replicas.look(5)
    await replicas.look(6, after_s=SHOWN_AFTER_S - 1)
    await replicas.look(6, after_s=SHOWN_AFTER_S - 1)
    assert replicas.keeping_up.trouble == "", "another version has a time of its own"


async def test_replicas_that_go_away_later_are_told_and_end_the_run_too():
    """keeping_up.py 1 and 2: nothing newer is published while nothing is sampled."""
    replicas = Replicas(newest=4)
    await replicas.look(4)
    await replicas.look(4, after_s=1000)
    replicas.away = "r1: connection refused"
    await replicas.look(4)
    await replicas.look(4, after_s=NOTE_AFTER_S - 1)
    assert not replicas.notes
    await replicas.look(4, after_s=1)
    replicas.away = ""
    await replicas.look(4, after_s=1)
    assert replicas.notes == [
        "waits for inference to serve version 4: r1: connection refused",
        "inference serves version 4 after 31 s",
    ]
    replicas.away = "r1: out of service: canary"
    await replicas.look(4)
    with pytest.raises(RunInterrupted, match=r"version 4 for 601 s .* out of service: canary; mend that"):
        await replicas.look(4, after_s=PATIENCE_S + 1)


async def test_a_version_that_never_comes_interrupts_the_run_but_not_for_the_trainers_own_absence():
    """keeping_up.py 2"""
    replicas = Replicas()
    await replicas.look(1)
    replicas.now += PATIENCE_S + 1
    replicas.keeping_up.interrupted()  # the trainer was brought up again: from now on it can be fetched
    await replicas.look(1)
    await replicas.look(1, after_s=PATIENCE_S)
    with pytest.raises(RunInterrupted, match=r"version 1 for 601 s .* r1: version 0; nothing newer"):
        await replicas.look(1, after_s=1)


async def test_nobody_waits_for_a_version_that_none_can_ever_serve():
    """keeping_up.py 3"""
    replicas = Replicas(newest=3)
    replicas.said_of_all = "no numbers"
    await replicas.look(3)
    with pytest.raises(RunFailed, match="no numbers"):
        await replicas.look(4)
    replicas.away = "r1: adapter unloaded"
    with pytest.raises(RunFailed, match="no numbers"):
        await replicas.look(3)
    assert not replicas.notes


@pytest.mark.parametrize("has_canary", [False, True])
async def test_a_run_whose_adapter_computes_no_numbers_fails_with_its_rate(world, monkeypatch, has_canary):
    """keeping_up.py 3: where the trainer said what is to be computed, the replica may be damaged: the run
    waits."""
    monkeypatch.setattr(training, "GUARD_S", 0.02)
    world.patience_s = 0.6
    asked: list[tuple[str, int]] = []

    async def canary(self, run_id, version):
        asked.append((run_id, version))
        return has_canary or version < 2

    async def dies(self, request, context):
        model = ipb.GetModelResponse()
        if world.trainer.latest.get(RUN, 0) < 2:
            model.adapters.add(run_id=RUN, policy_version=world.trainer.latest.get(RUN, 0))
        else:
            model.refused_adapters.add(run_id=RUN, why="log-probabilities that are no numbers")
        return model

    monkeypatch.setattr(TrainerClient, "has_canary", canary)
    monkeypatch.setattr("orch_fakes.FakePolicy.GetModel", dies)
    await world.serve("policy")
    toml = world.toml(off_policy=0, evals=0, learning_rate=1e30) + "\n[lora]\nenabled = true"
    plain = world.trainer.wait_version

    async def waits(run_id, version):
        await (asyncio.Event().wait() if version >= 2 else plain(run_id, version))

    monkeypatch.setattr(world.trainer, "wait_version", waits)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, toml, dry_run=False)
        ended = await world.rest(runs)
    assert (RUN, 2) in asked
    if has_canary:
        assert ended.phase == pb.RUN_PHASE_STOPPED and "inference does not serve version 2" in ended.error
    else:
        assert ended.phase == pb.RUN_PHASE_FAILED
        assert "version 2 give log-probabilities that are no numbers" in ended.error
        assert "learning_rate = 1e+30: lower it" in ended.error
        assert ended.ledger.in_flight == 0 and ended.ledger.discarded["run_failed"]


async def test_a_run_whose_replicas_refuse_its_versions_is_stopped_with_the_reason_and_goes_on(
    world, monkeypatch
):
    """Nothing else speaks up: rollouts wait for the version inside inference."""
    monkeypatch.setattr(training, "GUARD_S", 0.02)
    monkeypatch.setattr(keeping_up, "NOTE_AFTER_S", 0.1)
    world.patience_s = 0.6
    plain = world.trainer.push
    monkeypatch.setattr(world.trainer, "push", lambda run, version: plain(run, min(version, 2)))
    await world.serve("policy")
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(off_policy=0), dry_run=False)
        stopped = await world.rest(runs)
        assert stopped.phase == pb.RUN_PHASE_STOPPED
        assert "inference does not serve version 3" in stopped.error and "version 2" in stopped.error
        monkeypatch.setattr(world.trainer, "push", plain)
        world.trainer.push(RUN, 3)
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs))
        notes = [one.note.message for one in await events(runs) if one.WhichOneof("kind") == "note"]
    assert sum("waits for inference to serve version 3" in note for note in notes) == 1


async def test_a_run_whose_adapter_dies_after_it_was_served_is_stopped_with_the_reason(world, monkeypatch):
    """Its rollouts wait inside inference, and the evaluation for them."""
    monkeypatch.setattr(training, "GUARD_S", 0.02)
    monkeypatch.setattr(keeping_up, "NOTE_AFTER_S", 0.1)
    world.patience_s = 0.6
    world.host.stuck = {("toy", task) for task in range(6)}
    asked = 0

    async def dies(self, request, context):
        nonlocal asked
        asked += 1
        model = ipb.GetModelResponse()
        if asked <= 5:
            model.adapters.add(run_id=RUN, policy_version=0)
        else:
            model.refused_adapters.add(run_id=RUN, why="the base is another model than the run's")
        return model

    monkeypatch.setattr("orch_fakes.FakePolicy.GetModel", dies)
    await world.serve("policy")
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml() + "\n[lora]\nenabled = true", dry_run=False)
        stopped = await world.rest(runs)
        notes = [one.note.message for one in await events(runs) if one.WhichOneof("kind") == "note"]
    assert stopped.phase == pb.RUN_PHASE_STOPPED
    assert "does not serve version 0" in stopped.error and "another model than the run's" in stopped.error
    assert sum("waits for inference to serve version 0" in note for note in notes) == 1


async def test_a_replica_says_of_an_older_version_why_the_next_one_was_refused(world, monkeypatch):
    async def refuses(self, request, context):
        return ipb.GetModelResponse(
            run_id=RUN, policy_version=2, update_refusals=[ipb.UpdateRefusal(why="CHECKSUM_MISMATCH: torn")]
        )

    monkeypatch.setattr("orch_fakes.FakePolicy.GetModel", refuses)
    await world.serve("policy")
    policies = world.services().policies
    with pytest.raises(QuartetError, match=r"version 2; nothing newer comes to it: CHECKSUM_MISMATCH: torn"):
        await policies.serving(RUN, 3)
    await policies.close()
