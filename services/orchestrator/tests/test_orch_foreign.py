"""StreamRollouts: a run whose trainer is somebody else's program."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
from contextlib import asynccontextmanager, suppress

import pytest
from foreign_trainer import ForeignTrainer, when_called
from orch_world import RUN, World, serving
from quartet.errors import QuartetError
from quartet.kit import stream as kit_stream
from quartet.kit.call import stream, unary
from quartet.kit.channel import connect
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from quartet_orchestrator import credit, foreign
from quartet_orchestrator.journal import Journal
from quartet_orchestrator.policies import Policies
from quartet_orchestrator.segments import Segments
from quartet_orchestrator.state import COMPLETED, STOPPED

STEPS = 4


@pytest.fixture
async def world(tmp_path):
    """Without a trainer of Quartet's: an environment host, and a replica that takes what is pushed."""
    world = World(tmp_path)
    await world.serve("host")
    await world.serve("policy")
    yield world
    await world.close()


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(foreign, "LOOK_S", 0.01)


def toml(steps=STEPS, evals=0, **more):
    lines = {"model": '"m"', "max_steps": steps, "batch_size": 8, "rollouts_per_example": 4}
    lines |= {"external_trainer": "true", **more}
    top = "\n".join(f"{key} = {value}" for key, value in lines.items())
    return f'{top}\n[[env]]\nid = "toy"\n[eval]\nnum_examples = {evals}'


async def submit(stub, text=None):
    request = pb.SubmitRunRequest(run_id=RUN, config_toml=text or toml())
    return (await unary(stub.SubmitRun, request, timeout_s=20)).run


async def status(stub):
    return (await unary(stub.GetRunStatus, pb.GetRunStatusRequest(run_id=RUN), timeout_s=20)).run


async def over(stub):
    """The run, once it rests."""
    _ = [event async for event in stream(stub.WatchRun(pb.WatchRunRequest(run_id=RUN)), idle_timeout_s=20)]
    return await status(stub)


def trainer_of(world, **more):
    return ForeignTrainer(push=lambda version: world.trainer.push(RUN, version), **more)


def assert_trained(trainer, run, steps=STEPS):
    """Invariants 1 and 2: every group of every step once, nothing unaccounted for."""
    assert run.phase == COMPLETED, run.error
    assert trainer.version == run.step == steps and not trainer.step
    assert len({taken.head.group for taken in trainer.trained}) == len(trainer.trained) == 2 * steps
    assert run.ledger.trained == 8 * steps and run.ledger.in_flight == 0
    assert run.ledger.dispatched == run.ledger.trained + sum(run.ledger.discarded.values())


async def test_a_run_is_trained_by_somebody_else(world):
    """foreign.py 1: steps in order, credited, fresh enough (invariant 4)."""
    trainer = trainer_of(world)
    async with serving(world) as stub:
        await submit(stub, toml(evals=2, max_off_policy_steps=1))
        await trainer.live(stub)
        run = await over(stub)
        watched = stream(stub.WatchRun(pb.WatchRunRequest(run_id=RUN)), idle_timeout_s=20)
        steps = [event.step async for event in watched if event.WhichOneof("kind") == "step"]
        await trainer.live(stub)  # nothing is left, and that is no error
    assert_trained(trainer, run)
    assert run.HasField("reward_before") and run.HasField("reward_after")
    assert set(trainer.came.values()) == {1}
    assert [taken.head.step for taken in trainer.trained] == [1, 1, 2, 2, 3, 3, 4, 4]
    for taken in trainer.trained:
        rewards = [rollout.reward for rollout in taken.rollouts]
        (expected,) = credit.advantages("grpo", [rewards])
        assert taken.advantages == [[pytest.approx(value)] for value in expected]
        assert taken.head.normalizer == 16  # tokens of the batch
        versions = {
            span.policy_version for one in taken.rollouts for sample in one.samples for span in sample.spans
        }
        assert all(0 <= taken.head.step - 1 - version <= 1 for version in versions)
    assert [step.metrics["train/reward"] >= 0 for step in steps] == [True] * STEPS
    assert all("train/loss" not in step.metrics and step.metrics["time/step_s"] >= 0 for step in steps)
    assert [step.ledger.trained for step in steps] == [8, 16, 24, 32]


class Died(Exception):
    """A test's own way to kill a trainer."""


async def test_a_run_that_goes_on_with_other_settings_has_its_trainer_call_again(world):
    """going_on.py 4: as after a restart of the orchestrator, and not as if it had ended."""
    trainer = trainer_of(world)
    async with serving(world) as stub:
        await submit(stub, toml(steps=12))
        living = asyncio.create_task(trainer.live(stub))
        while trainer.version < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await submit(stub, toml(steps=12, max_concurrent=64))
        with pytest.raises(QuartetError, match="goes on with other settings; call again") as told:
            await living
        assert told.value.reason == "NOT_READY"
        await trainer.live(stub)
        run = await over(stub)
    assert_trained(trainer, run, 12)


async def test_a_client_killed_between_send_and_ack_gets_the_group_again(world):
    """foreign.py 2: at least once until acknowledged, and never after that."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    def dies_at_times(taken):
        if chance.random() < 0.3 or (not deaths and taken.head.step == 6):  # once at least
            raise Died

    trainer, deaths = trainer_of(world, about_to_ack=dies_at_times), 0
    async with serving(world) as stub:
        await submit(stub, toml(steps=12))
        while True:
            acked = acknowledged(world)
            before = dict(trainer.came)
            try:
                await trainer.live(stub)
                break
            except Died:
                deaths += 1
            assert not {group for group in acked if trainer.came[group] != before[group]}
        run = await over(stub)
    assert_trained(trainer, run, 12)
    assert deaths and max(trainer.came.values()) > 1


def acknowledged(world):
    """The groups whose acknowledgement is on disk, read from a copy beside whoever holds the journal."""
    folder = world.folder / "runs" / RUN
    if not folder.exists():
        return set()
    copy = world.folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for segment in folder.glob("*.seg"):
        shutil.copy(segment, copy)
    journal = Journal(copy)
    found = {record.acked.group for record in journal.select("acked")}
    journal.close()
    return found


@asynccontextmanager
async def process_of(world):
    """An orchestrator of the world's as a process, killed in the end."""
    port_file = world.folder / "port"
    port_file.unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quartet_orchestrator"),
        f'--envhost_addresses=["{world.addresses["host"]}"]',
        f'--inference_addresses=["{world.addresses["policy"]}"]',
        *(f"--data_dir={world.folder}", f"--server.port_file={port_file}"),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        while not port_file.exists():
            assert process.returncode is None
            await asyncio.sleep(0.02)
        async with connect(port_file.read_text().strip()) as channel:
            yield process, OrchestratorServiceStub(channel)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_an_orchestrator_killed_with_sigkill_hands_out_what_was_not_acknowledged(world):
    """Invariant 9, and foreign.py 2: the trainer calls again and loses nothing."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    trainer, lives, run = trainer_of(world), 0, pb.Run()
    world.host.max_delay_s = 0.02
    while run.phase != COMPLETED:
        assert lives < 20
        acked, before = acknowledged(world), dict(trainer.came)
        async with process_of(world) as (process, stub):
            await submit(stub, toml(steps=8))
            living = asyncio.create_task(trainer.live(stub))
            if lives < 3:
                await asyncio.wait({living}, timeout=chance.uniform(0.1, 0.5))
                process.kill()
            with suppress(QuartetError):
                await living
            if process.returncode is None and lives >= 3:
                run = await over(stub)
        assert not {group for group in acked if trainer.came[group] != before[group]}
        lives += 1
    assert_trained(trainer, run, 8)


async def test_a_power_cut_loses_nothing_that_was_handed_out(world, monkeypatch):
    """Invariant 2: a journal that ends where it was synced last has the batch, and every rollout of it."""
    synced, plain = [], Segments.syncer

    def syncer(segments):
        sync, end = plain(segments), segments._end

        def sync_and_note():
            sync()
            synced.append(end)

        return sync_and_note

    monkeypatch.setattr(Segments, "syncer", syncer)
    after, found = world.folder / "after", []

    def is_on_disk(taken):
        shutil.rmtree(after, ignore_errors=True)
        after.mkdir()
        shutil.copy(world.folder / "runs" / RUN / "000001.seg", after)
        os.truncate(after / "000001.seg", max(synced))
        journal, group = Journal(after), taken.head.group
        closed = journal.select("batch", step=taken.head.step)
        found.append(bool(closed) and len(journal.select("rollout", group=group)) == len(taken.rollouts))
        journal.close()

    trainer = trainer_of(world, about_to_ack=is_on_disk)
    async with serving(world) as stub:
        await submit(stub)
        await trainer.live(stub)
        assert_trained(trainer, await over(stub))
    assert found == [True] * 2 * STEPS


@pytest.mark.parametrize("credits", [0, 1])
async def test_no_more_is_sent_than_was_granted(world, credits):
    """foreign.py 3 and invariant 8: of the two groups of the first step."""

    async def says():
        yield pb.StreamRolloutsRequest(start=pb.StreamRolloutsStart(run_id=RUN))
        yield pb.StreamRolloutsRequest(credits=credits)
        await asyncio.Event().wait()

    world.trainer.push(RUN, 0)
    count = 0
    async with serving(world) as stub:
        await submit(stub)
        with suppress(TimeoutError):
            async with asyncio.timeout(60 if credits else 1.0) as limit:
                async for frame in stream(stub.StreamRollouts(says()), idle_timeout_s=20, sends=True):
                    count += frame.HasField("group")
                    if frame.HasField("group"):  # and what comes after it
                        limit.reschedule(asyncio.get_running_loop().time() + 1.0)
    assert count == credits


async def first_group(stub, before=(), then=()):
    """The number of the first group of a new stream that says this before any comes, and that when it did."""
    came = asyncio.Event()

    async def says():
        yield pb.StreamRolloutsRequest(start=pb.StreamRolloutsStart(run_id=RUN))
        for number in before:
            yield pb.StreamRolloutsRequest(ack=number)
        yield pb.StreamRolloutsRequest(credits=1)
        await came.wait()
        for number in then:
            yield pb.StreamRolloutsRequest(ack=number)
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        async for frame in stream(stub.StreamRollouts(says()), idle_timeout_s=20, sends=True):
            if frame.HasField("group"):
                came.set()
                if not then:
                    return frame.group.group
    raise AssertionError("the stream ended")


async def test_a_group_that_was_not_sent_is_not_acknowledged(world):
    """foreign.py 2: whoever counts wrongly is told, and the group is sent to him all the same. What an
    orchestrator before this one sent may be acknowledged first of all."""
    world.trainer.push(RUN, 0)
    trainer = trainer_of(world)
    async with serving(world) as stub:
        await submit(stub)
        sent = await first_group(stub)
        with pytest.raises(QuartetError, match="acknowledge groups that were sent") as caught:
            await first_group(stub, then=[1 - sent])
        assert caught.value.reason == "INVALID_REQUEST"
        assert acknowledged(world) == set()
    async with serving(world) as stub:
        assert await first_group(stub, before=[sent]) == 1 - sent
        assert acknowledged(world) == {sent}
        trainer.version = 1  # it has trained on the first step before
        await trainer.live(stub)
        run = await over(stub)
    assert run.phase == COMPLETED and sent not in trainer.came


async def test_the_newest_stream_is_served(world, monkeypatch):
    """foreign.py 4"""
    opened = when_called(monkeypatch, "stream")
    first, second = trainer_of(world, credits=0), trainer_of(world)
    async with serving(world) as stub:
        await submit(stub)
        older = asyncio.create_task(first.live(stub))
        await opened.wait()
        await second.live(stub)
        run = await over(stub)
        with pytest.raises(QuartetError) as caught:
            await older
    assert caught.value.reason == "RUN_CONFLICT" and "took over" in caught.value.message
    assert not first.came
    assert_trained(second, run)


async def test_a_trainer_that_stays_away_stops_the_run(world):
    """foreign.py 5: resumable, and the run goes on with it."""
    world.patience_s = 0.3
    trainer = trainer_of(world)
    async with serving(world) as stub:
        await submit(stub)
        run = await over(stub)
        assert run.phase == STOPPED and "no trainer has called StreamRollouts" in run.error
        with pytest.raises(QuartetError, match="is STOPPED") as caught:
            await trainer.live(stub)
        assert caught.value.reason == "RUN_NOT_SERVED"
        world.have_patience(60.0)  # a busy machine may need more than that moment to call
        await unary(stub.ResumeRun, pb.ResumeRunRequest(run_id=RUN), timeout_s=20)
        await trainer.live(stub)
        assert_trained(trainer, await over(stub))


async def test_a_run_can_be_stopped_while_it_waits_for_its_trainer(world, monkeypatch):
    opened, waits = when_called(monkeypatch, "stream"), when_called(monkeypatch, "publish")
    async with serving(world) as stub:
        await submit(stub)
        trainer = trainer_of(world, credits=0)
        living = asyncio.create_task(trainer.live(stub))
        await opened.wait()
        await waits.wait()
        await unary(stub.StopRun, pb.StopRunRequest(run_id=RUN), timeout_s=20)
        assert (await over(stub)).phase == STOPPED
        with pytest.raises(QuartetError, match="is stopped or has failed"):
            await living
        await unary(stub.ResumeRun, pb.ResumeRunRequest(run_id=RUN), timeout_s=20)
        trainer.credits = 2
        await trainer.live(stub)
        assert_trained(trainer, await over(stub))


async def test_what_overlong_filtering_leaves_out_is_not_sent(world):
    world.host.truncated_members = {1}
    trainer = trainer_of(world)
    async with serving(world) as stub:
        await submit(stub, toml() + "\n[algorithm]\noverlong_filtering = true")
        await trainer.live(stub)
        assert_trained(trainer, await over(stub))
    for taken in trainer.trained:
        assert sorted(one.member for one in taken.rollouts) == [0, 2, 3]
        assert taken.head.normalizer == 12


async def test_a_silent_stream_beats(world, monkeypatch):
    """Invariant 7: every stream has a heartbeat."""
    monkeypatch.setattr(kit_stream.with_heartbeats, "__defaults__", (0.05,))

    async def says():
        yield pb.StreamRolloutsRequest(start=pb.StreamRolloutsStart(run_id=RUN))
        await asyncio.Event().wait()

    async with serving(world) as stub:
        await submit(stub)
        beats = 0
        async for frame in stream(stub.StreamRollouts(says()), idle_timeout_s=20, sends=True):
            beats += frame.HasField("heartbeat")
            if beats == 3:
                break
    assert beats == 3


@pytest.mark.parametrize(
    ("said", "reason", "words"),
    [
        ([{"credits": 1}], "INVALID_REQUEST", "frame = credits is refused; begin with start"),
        ([{"start": {"run_id": "nobody"}}], "RUN_UNKNOWN", "no run"),
        ([{"start": {"run_id": RUN}}, {"ack": 3}], "INVALID_REQUEST", "ack = 3"),
        ([{"start": {"run_id": RUN}}, {"credits": 1 << 30}], "INVALID_REQUEST", "at most"),
        ([{"start": {"run_id": RUN}}, {"start": {"run_id": RUN}}], "INVALID_REQUEST", "start once"),
    ],
)
async def test_what_makes_no_sense_is_refused(world, said, reason, words):
    async def says():
        for one in said:
            yield pb.StreamRolloutsRequest(**one)
        await asyncio.Event().wait()

    async with serving(world) as stub:
        await submit(stub)
        with pytest.raises(QuartetError, match=words) as caught:
            _ = [frame async for frame in stream(stub.StreamRollouts(says()), idle_timeout_s=20, sends=True)]
    assert caught.value.reason == reason


async def test_a_run_that_nobody_could_train_is_refused(world):
    async with serving(world) as stub:
        with pytest.raises(QuartetError, match="has no trainer") as caught:
            await submit(stub, toml(external_trainer="false"))
        assert caught.value.metadata["key"] == "external_trainer"
        with pytest.raises(QuartetError, match="learning_rate is a setting of Quartet's trainer"):
            await submit(stub, toml(learning_rate=1.0))
    del world.addresses["policy"]
    async with serving(world) as stub:
        with pytest.raises(QuartetError, match="give it inference_addresses"):
            await submit(stub)


async def test_quartets_own_trainer_shares_its_batches_with_nobody(world):
    await world.serve("trainer")
    async with serving(world) as stub:
        await submit(stub, toml(external_trainer="false"))
        with pytest.raises(QuartetError, match="is trained by Quartet's trainer") as caught:
            await trainer_of(world).live(stub)
    assert caught.value.reason == "INVALID_REQUEST"


@pytest.mark.parametrize("reason", ["INTERNAL", "UNAUTHENTICATED"])
async def test_a_replica_that_cannot_say_what_it_serves_is_asked_again(world, monkeypatch, reason):
    """Whoever pushed to it goes on, too: no run ends for good by a fault that passes."""
    served, faults = Policies.serving, []

    async def faulty(policies, run_id, version, *, adapter=False, digest=None):
        if version == 2 and len(faults) < 3:
            faults.append(version)
            raise QuartetError(reason, "not now")
        await served(policies, run_id, version, adapter=adapter)

    monkeypatch.setattr(Policies, "serving", faulty)
    trainer = trainer_of(world)
    async with serving(world) as stub:
        await submit(stub)
        await trainer.live(stub)
        run = await over(stub)
    assert_trained(trainer, run)
    assert len(faults) == 3
