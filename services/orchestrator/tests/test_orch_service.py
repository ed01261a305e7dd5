"""The RPCs of the orchestrator over loopback gRPC, and a real process that is killed with SIGKILL."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from contextlib import suppress

import pytest
from orch_world import serving
from quartet.errors import QuartetError
from quartet.kit.call import stream, unary
from quartet.kit.channel import connect
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from quartet_orchestrator.book import Book
from quartet_orchestrator.journal import Journal
from quartet_orchestrator.service import listing

TOML = """
model = "m"
max_steps = 4
batch_size = 8
rollouts_per_example = 4
[[env]]
id = "toy"
[eval]
num_examples = 2
"""


async def submit(stub, toml=TOML, run_id="run", dry_run=False):
    request = pb.SubmitRunRequest(run_id=run_id, config_toml=toml, dry_run=dry_run)
    return (await unary(stub.SubmitRun, request, timeout_s=20)).run


async def test_submit_watch_status_list(world):
    async with serving(world) as stub:
        dry = await submit(stub, dry_run=True)
        assert dry.max_steps == 4 and dry.phase == pb.RUN_PHASE_UNSPECIFIED
        assert not (await unary(stub.ListRuns, pb.ListRunsRequest(), timeout_s=20)).runs
        await submit(stub)
        seen = []
        async for event in stream(stub.WatchRun(pb.WatchRunRequest(run_id="run")), idle_timeout_s=20):
            seen.append(event)
        assert seen[-1].phase.run.phase == pb.RUN_PHASE_COMPLETED
        numbers = [event.event for event in seen if event.event]
        assert numbers == sorted(set(numbers))
        whole = pb.WatchRunRequest(run_id="run", include_rollouts=True)
        rollouts = [e async for e in stream(stub.WatchRun(whole), idle_timeout_s=20)]
        assert [event.event for event in rollouts] == list(range(1, seen[-1].event + 1))
        kinds = [event.rollout for event in rollouts if event.WhichOneof("kind") == "rollout"]
        assert sum(rollout.HasField("step") for rollout in kinds) == 32
        again = await submit(stub)
        assert again.phase == pb.RUN_PHASE_COMPLETED
        status = (await unary(stub.GetRunStatus, pb.GetRunStatusRequest(run_id="run"), timeout_s=20)).run
        listed = (await unary(stub.ListRuns, pb.ListRunsRequest(), timeout_s=20)).runs
        assert status.config_toml == TOML and status.last_event == seen[-1].event
        status.ClearField("config_toml")
        assert list(listed) == [status]
        beyond = stub.WatchRun(pb.WatchRunRequest(run_id="run", after_event=seen[-1].event + 1))
        with pytest.raises(QuartetError, match=f"the last event of run 'run' is {seen[-1].event};") as caught:
            [event async for event in stream(beyond, idle_timeout_s=20)]
        assert caught.value.reason == "INVALID_REQUEST"


@pytest.mark.parametrize(
    ("change", "reason", "text"),
    [
        (("max_steps", "max_stepps"), "INVALID_CONFIG", "max_steps"),
        (("batch_size = 8", "batch_size = 9"), "INVALID_CONFIG", "batch_size"),
        (('"toy"', '"nowhere"'), "ENVIRONMENT_UNKNOWN", "nowhere"),
        (("num_examples = 2", "num_examples = ["), "INVALID_CONFIG", "TOML"),
        (("[eval]", '[algorithm]\nadvantage = "dr_grpo"\n[eval]'), "INVALID_CONFIG", "max_tokens"),
        (("rollouts_per_example = 4", "rollouts_per_example = 1"), "INVALID_CONFIG", "at least 2"),
    ],
)
async def test_bad_configurations_are_refused_and_leave_nothing(world, change, reason, text):
    async with serving(world) as stub:
        with pytest.raises(QuartetError, match=text) as caught:
            await submit(stub, TOML.replace(*change))
        assert caught.value.reason == reason
        assert not (await unary(stub.ListRuns, pb.ListRunsRequest(), timeout_s=20)).runs
    assert not list((world.folder / "runs").iterdir())


async def test_tables_that_the_orchestrator_does_not_read_are_told(world):
    """As the comment of SubmitRunRequest.config_toml says."""
    tables = '[trainer]\nthreads = 2\n[inference]\nreplicas = 3\n[envhost]\n[wandb]\nproject = "p"\n'
    async with serving(world) as stub:
        for run_id, toml in (("run", f"keep_rollouts = 3\n{TOML}{tables}"), ("plain", TOML)):
            await submit(stub, toml, run_id)
        notes = {}
        for run_id in ("run", "plain"):
            watched = stub.WatchRun(pb.WatchRunRequest(run_id=run_id))
            events = [event async for event in stream(watched, idle_timeout_s=20)]
            notes[run_id] = [one.note.message for one in events if "not read" in one.note.message]
    (told,) = notes["run"]
    assert told.startswith("not read here: [trainer], [inference] (the services are running already")
    assert "; keep_rollouts, [wandb] (of whoever follows" in told and not notes["plain"]


async def test_typed_errors(world):
    async with serving(world) as stub:
        await submit(stub)
        with pytest.raises(QuartetError) as caught:
            await submit(stub, TOML.replace("max_steps = 4", "max_steps = 5"))
        assert caught.value.reason == "RUN_CONFLICT"
        again = await submit(stub, TOML + '[wandb]\nproject = "p"\n')
        assert again.run_id == "run", "where a run is shown does not make it another"
        for run_id in ("", "a/b", "..", "x" * 65):
            with pytest.raises(QuartetError) as caught:
                await submit(stub, run_id=run_id)
            assert caught.value.reason == "INVALID_REQUEST"
        for method, request in (
            (stub.GetRunStatus, pb.GetRunStatusRequest(run_id="other")),
            (stub.StopRun, pb.StopRunRequest(run_id="other")),
            (stub.ResumeRun, pb.ResumeRunRequest(run_id="other")),
        ):
            with pytest.raises(QuartetError) as caught:
                await unary(method, request, timeout_s=20)
            assert caught.value.reason == "RUN_UNKNOWN"
        with pytest.raises(QuartetError) as caught:
            _ = [e async for e in stream(stub.WatchRun(pb.WatchRunRequest(run_id="no")), idle_timeout_s=20)]
        assert caught.value.reason == "RUN_UNKNOWN"


async def test_a_slow_environment_holds_up_its_own_submission_alone(world):
    """runs.py 3."""
    world.host.describing["slow"] = asyncio.Event()
    async with serving(world) as stub:
        toml = TOML.replace("toy", "slow")
        first = asyncio.create_task(submit(stub, toml, "slow"))
        while not world.host.described:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        slow = [first, asyncio.create_task(submit(stub, toml, "slow"))]
        conflict = asyncio.create_task(submit(stub, TOML, "slow"))
        assert (await submit(stub, run_id="quick")).phase == pb.RUN_PHASE_PENDING
        assert not any(task.done() for task in (*slow, conflict))
        world.host.describing["slow"].set()
        assert {run.run_id for run in await asyncio.gather(*slow)} == {"slow"}
        with pytest.raises(QuartetError, match="another configuration"):
            await conflict
        listed = (await unary(stub.ListRuns, pb.ListRunsRequest(), timeout_s=20)).runs
        assert sorted(run.run_id for run in listed) == ["quick", "slow"]


async def test_stop_and_submit_are_idempotent(world):
    world.trainer.delay_s = 0.05
    async with serving(world) as stub:
        await submit(stub)
        stop = pb.StopRunRequest(run_id="run")
        phases = [(await unary(stub.StopRun, stop, timeout_s=20)).run.phase for _ in range(2)]
        assert phases[0] == pb.RUN_PHASE_STOPPING
        assert phases[1] in (pb.RUN_PHASE_STOPPING, pb.RUN_PHASE_STOPPED)
        assert (await submit(stub)).phase in (pb.RUN_PHASE_STOPPING, pb.RUN_PHASE_STOPPED)
        watched = stub.WatchRun(pb.WatchRunRequest(run_id="run"))
        events = [event async for event in stream(watched, idle_timeout_s=20)]
        assert events[-1].phase.run.phase == pb.RUN_PHASE_STOPPED
        assert (await unary(stub.StopRun, stop, timeout_s=20)).run.phase == pb.RUN_PHASE_STOPPED
        assert (await submit(stub)).phase == pb.RUN_PHASE_STOPPED


async def test_a_stop_while_the_submission_is_not_yet_on_disk(world, monkeypatch):
    """runs.py 1"""
    slow = asyncio.Event()

    async def settled(_book):
        await slow.wait()

    async with serving(world) as stub:
        monkeypatch.setattr(Book, "settled", settled)
        submitting = asyncio.create_task(submit(stub))
        await asyncio.sleep(0.2)
        with pytest.raises(QuartetError) as caught:
            await unary(stub.StopRun, pb.StopRunRequest(run_id="run"), timeout_s=20)
        assert caught.value.reason == "RUN_UNKNOWN"
        monkeypatch.undo()
        slow.set()
        assert (await submitting).phase == pb.RUN_PHASE_PENDING


async def test_many_runs_are_listed_in_one_message(world):
    """Invariant 8: messages end at 4 MiB, whatever the runs' configurations add up to."""
    padded = TOML + "# " + "x" * 1_500_000
    async with serving(world) as stub:
        for number in range(4):
            await submit(stub, padded, run_id=f"run-{number}")
        listed = (await unary(stub.ListRuns, pb.ListRunsRequest(), timeout_s=20)).runs
        assert {run.run_id for run in listed} == {f"run-{number}" for number in range(4)}
        status = (await unary(stub.GetRunStatus, pb.GetRunStatusRequest(run_id="run-2"), timeout_s=20)).run
        assert status.config_toml == padded


def test_a_listing_ends_before_it_is_too_large():
    runs = [pb.Run(run_id=f"run-{number}", error="e" * 500) for number in range(10_000)]
    listed = listing(runs)
    assert 4000 < len(listed.runs) < 10_000 and listed.ByteSize() <= 3 << 20
    assert listed.runs[0].run_id == "run-0"


async def test_followers_do_not_hold_up_a_drain(world):
    """SIGTERM with followers of a run in which nothing happens: much less than a drain may take."""
    world.trainer.delay_s = 30.0
    port_file = world.folder / "port"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "quartet_orchestrator",
        f"--trainer_address={world.addresses['trainer']}",
        f'--envhost_addresses=["{world.addresses["host"]}"]',
        f"--data_dir={world.folder}",
        f"--server.port_file={port_file}",
        "--server.drain_seconds=60",
        stderr=asyncio.subprocess.DEVNULL,
    )
    while not port_file.exists():
        assert process.returncode is None
        await asyncio.sleep(0.02)
    async with connect(port_file.read_text().strip()) as channel:
        stub = OrchestratorServiceStub(channel)
        await submit(stub)
        watches = [stub.WatchRun(pb.WatchRunRequest(run_id="run")) for _ in range(3)]
        for watch in watches:
            await watch.read()
        began = asyncio.get_running_loop().time()
        process.send_signal(signal.SIGTERM)
        for watch in watches:
            with pytest.raises(QuartetError) as caught:
                _ = [event async for event in stream(watch, idle_timeout_s=20)]
            assert caught.value.reason == "NOT_READY"
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert asyncio.get_running_loop().time() - began < 30


async def test_damage_that_a_follower_meets_is_a_typed_error(world, monkeypatch):
    """A rollout of long ago went bad: whoever asks for it is told, nobody else is disturbed."""
    monkeypatch.setattr(Journal.__init__, "__defaults__", (1500,))
    async with serving(world) as stub:
        await submit(stub)
        _ = [e async for e in stream(stub.WatchRun(pb.WatchRunRequest(run_id="run")), idle_timeout_s=20)]
    folder = world.folder / "runs" / "run"
    journal = Journal(folder)
    first = next(r for r in journal.events(0, 100, rollouts=True) if r.WhichOneof("kind") == "rollout")
    segment, offset = journal._index.execute(
        "SELECT segment, offset FROM records WHERE number = ?", (first.number,)
    ).fetchone()
    journal.close()
    path = folder / f"{segment:06d}.seg"
    data = bytearray(path.read_bytes())
    data[offset + 20] ^= 1
    path.write_bytes(data)
    async with serving(world) as stub:
        listed = (await unary(stub.ListRuns, pb.ListRunsRequest(), timeout_s=20)).runs
        assert [run.phase for run in listed] == [pb.RUN_PHASE_COMPLETED]
        steps = stub.WatchRun(pb.WatchRunRequest(run_id="run"))
        assert [e async for e in stream(steps, idle_timeout_s=20)][-1].phase.run.reward_after > 0
        seen = []
        with pytest.raises(
            QuartetError, match=rf"{segment:06d}\.seg has a bad frame at byte {offset}"
        ) as caught:
            request = pb.WatchRunRequest(run_id="run", include_rollouts=True)
            async for event in stream(stub.WatchRun(request), idle_timeout_s=20):
                seen.append(event.event)
        assert caught.value.reason == "CHECKSUM_MISMATCH"
        assert first.event not in seen


async def test_a_process_killed_with_sigkill_goes_on_by_itself(world):
    """Invariant 9 for the orchestrator."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    world.trainer.delay_s = 0.02
    port_file = world.folder / "port"
    arguments = [
        f"--trainer_address={world.addresses['trainer']}",
        f'--envhost_addresses=["{world.addresses["host"]}"]',
        f"--data_dir={world.folder}",
        f"--server.port_file={port_file}",
    ]
    toml = TOML.replace("max_steps = 4", "max_steps = 20")
    seen: list[int] = []
    phase = pb.RUN_PHASE_PENDING
    for attempt in range(4):
        port_file.unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quartet_orchestrator", *arguments, stderr=asyncio.subprocess.DEVNULL
        )
        while not port_file.exists():
            assert process.returncode is None
            await asyncio.sleep(0.02)
        channel = connect(port_file.read_text().strip())
        stub = OrchestratorServiceStub(channel)
        if attempt == 0:
            await submit(stub, toml)
        watch = stub.WatchRun(pb.WatchRunRequest(run_id="run", after_event=len(seen), include_rollouts=True))
        with suppress(TimeoutError):
            async with asyncio.timeout(100 if attempt == 3 else chance.uniform(0.05, 0.4)):
                async for event in stream(watch, idle_timeout_s=20):
                    if event.event:
                        seen.append(event.event)
                    if event.WhichOneof("kind") == "phase":
                        phase = event.phase.run.phase
                        run = event.phase.run
        process.send_signal(signal.SIGTERM if attempt == 3 else signal.SIGKILL)
        code = await asyncio.wait_for(process.wait(), 60)
        assert code == (0 if attempt == 3 else -signal.SIGKILL)
        await channel.close()
    assert phase == pb.RUN_PHASE_COMPLETED, run.error
    assert seen == list(range(1, len(seen) + 1))
    assert run.step == 20 and run.ledger.trained == 160 and run.ledger.in_flight == 0
    assert set(world.trainer.applied_calls.values()) == {1}
