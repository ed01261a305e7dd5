"""Evaluate: a run's policy measured for somebody who asks, while the run goes on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from orch_world import RUN, assert_complete, serving
from quartet.errors import QuartetError
from quartet.kit import stream as kit_stream
from quartet.kit.call import stream, unary
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb
from quartet_orchestrator import on_demand, outage
from quartet_orchestrator.hold import Hold

ASKED = """
num_examples = 3
rollouts_per_example = 2
[sampling]
temperature = 0.0
[[env]]
id = "toy"
name = "easy"
args = { level = 1 }
[[env]]
id = "other"
num_examples = 1
sampling = { max_tokens = 5 }
"""


async def submit(stub, toml, run_id=RUN):
    request = pb.SubmitRunRequest(run_id=run_id, config_toml=toml)
    await unary(stub.SubmitRun, request, timeout_s=20)


def evaluate(stub, toml=ASKED, run_id=RUN):
    return stream(stub.Evaluate(pb.EvaluateRequest(run_id=run_id, config_toml=toml)), idle_timeout_s=20)


async def refused(stub, toml=ASKED, run_id=RUN):
    with pytest.raises(QuartetError) as caught:
        _ = [frame async for frame in evaluate(stub, toml, run_id)]
    return caught.value


async def over(stub, run_id=RUN):
    """The run, once it rests."""
    _ = [event async for event in stream(stub.WatchRun(pb.WatchRunRequest(run_id=run_id)), idle_timeout_s=20)]
    return (await unary(stub.GetRunStatus, pb.GetRunStatusRequest(run_id=run_id), timeout_s=20)).run


def asked_for(world):
    return [request for request in world.host.requests if "/evaluate-" in request.request_id]


async def begun(world, count=1):
    """Returns once so many requests of evaluations have reached the host."""
    async with asyncio.timeout(60):
        while len(asked_for(world)) < count:  # noqa: ASYNC110 - the fake host has no event for it
            await asyncio.sleep(0.01)


async def test_one_version_is_measured_while_the_run_stands_still(world):
    """on_demand.py 1 and hold.py 1: trained on goes only what came after, and the run loses nothing by it."""
    async with serving(world) as stub:
        await submit(stub, world.toml(steps=6))
        versions = []
        for _ in range(3):
            frames = [frame async for frame in evaluate(stub)]
            result = frames[-1].result
            assert [frame.WhichOneof("frame") for frame in frames] == ["rollout"] * 8 + ["result"]
            sampled = {
                span.policy_version
                for frame in frames[:-1]
                for sample in frame.rollout.rollout.samples
                for span in sample.spans
            }
            assert sampled == {result.policy_version} and result.step == result.policy_version
            assert not any(frame.rollout.HasField("step") for frame in frames[:-1])
            metrics = result.metrics
            assert metrics["eval/coverage"] == 1 and metrics["eval/rollouts"] == 8
            assert {"eval/reward", "eval/easy/pass@2", "eval/other/reward", "eval/mean_length"} <= set(
                metrics
            )
            versions.append(result.policy_version)
        run = await over(stub)
        seen = stream(stub.WatchRun(pb.WatchRunRequest(run_id=RUN)), idle_timeout_s=20)
        told = [event.eval.step async for event in seen if event.WhichOneof("kind") == "eval"]
    assert_complete(world, run, steps=6)
    assert versions == sorted(versions)
    assert told == [0, 6]  # on_demand.py 2: of the others the run knows nothing
    requests = asked_for(world)
    sampled = {(one.environment.id, one.sampling.temperature, one.sampling.max_tokens) for one in requests}
    assert sampled == {("toy", 0.0, 0), ("other", 0.0, 5)}
    assert {request.environment.args_json for request in requests} == {"", '{"level": 1}'}
    assert {request.split for request in requests} == {epb.SPLIT_EVAL}


async def test_what_is_left_out_is_as_the_run_trains(world):
    world.trainer.delay_s = 0.05
    run = world.toml().replace('id = "toy"', 'id = "toy"\nsampling = { top_k = 3 }')
    run += "\n[sampling]\ntemperature = 0.5\nmax_tokens = 7\n[eval.sampling]\nmax_tokens = 9\n"
    async with serving(world) as stub:
        await submit(stub, run)
        _ = [frame async for frame in evaluate(stub, "num_examples = 2")]
    requests = asked_for(world)
    sampled = [(one.environment.id, one.sampling) for one in requests]
    assert {(env_id, how.temperature, how.max_tokens, how.top_k) for env_id, how in sampled} == {
        ("toy", 0.5, 7, 3)
    }
    assert sorted(request.task_index for request in requests) == [0, 1]


async def test_a_step_waits_for_who_held_before_it_and_nobody_for_two():
    """hold.py 1, 2"""
    hold, order = Hold(), []

    async def measure(name, release):
        async with hold.held():
            order.append(name)
            await release.wait()

    async def step(number):
        await hold.move()
        order.append(number)
        hold.moved()

    release = asyncio.Event()
    early = asyncio.create_task(measure("early", release))
    await asyncio.sleep(0.01)
    assert order == []  # before the first version
    hold.moved()
    await asyncio.sleep(0.01)
    moving = asyncio.create_task(step(1))
    await asyncio.sleep(0.01)
    late = asyncio.create_task(measure("late", release))
    given_up = asyncio.create_task(measure("given up", release))
    await asyncio.sleep(0.01)
    assert order == ["early"]
    given_up.cancel()
    release.set()
    await moving
    await step(2)  # without a pause in which "late" could ask again
    await asyncio.gather(early, late)
    assert order == ["early", 1, "late", 2]
    stays = asyncio.create_task(hold.ended())
    hold.end(QuartetError("RUN_NOT_SERVED", "over"))
    for one in (stays, measure("too late", release)):
        with pytest.raises(QuartetError, match="over"):
            await one


async def nothing_to_hold(hold):
    async with hold.held():
        raise AssertionError("it came to hold a version")


async def test_who_waits_is_told_of_the_end_whoever_else_gave_up():
    """hold.py 2"""
    hold = Hold()
    stays, given_up = (asyncio.create_task(nothing_to_hold(hold)) for _ in range(2))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    hold.end(QuartetError("RUN_NOT_SERVED", "over"))
    async with asyncio.timeout(60):
        with pytest.raises(QuartetError, match="over"):
            await stays


async def test_who_leaves_as_its_turn_comes_holds_nothing():
    """hold.py 1: else the next step would wait for ever."""
    hold = Hold()
    leaving = asyncio.create_task(nothing_to_hold(hold))
    await asyncio.sleep(0)
    hold.moved()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    async with asyncio.timeout(60):
        await hold.move()


async def test_who_leaves_ends_it_and_the_run_goes_on(world):
    """on_demand.py 2"""
    world.host.stuck = {("toy", 0)}
    async with serving(world) as stub:
        await submit(stub, world.toml(evals=0))
        async with aclosing(evaluate(stub)) as frames:
            first = await anext(frames)
            assert first.rollout.env_id in ("easy", "other")
            await begun(world)
            assert world.host.under_way
        run = await over(stub)
    assert_complete(world, run)
    assert world.host.under_way == 0


async def test_who_stops_reading_holds_nothing_up(world):
    """on_demand.py 1: the run stands still for what is measured, not for who reads of it."""
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(evals=0), dry_run=False)
        while runs.get(RUN).state.step < 1:
            await runs.get(RUN).changed()
        async with aclosing(runs.evaluation(RUN, ASKED).responses()) as frames:
            held = (await anext(frames)).rollout
            run = await world.rest(runs)
            left = [frame async for frame in frames]
    assert_complete(world, run)
    assert held.rollout.reward >= 0 and left[-1].result.metrics["eval/coverage"] == 1
    assert left[-1].result.step < run.step


async def test_failures_and_stuck_episodes_are_missing_and_no_reward(world):
    """Invariant 5, and measuring.py 3: an evaluation ends in time."""
    world.host.stuck = {("toy", 0)}
    async with serving(world) as stub:
        await submit(stub, world.toml(evals=0))
        frames = [frame async for frame in evaluate(stub, "timeout_seconds = 1.5" + ASKED)]
        run = await over(stub)
    assert_complete(world, run)
    metrics = frames[-1].result.metrics
    assert metrics["eval/coverage"] == 6 / 8 and metrics["eval/easy/failed/UNFINISHED"] == 2
    rewards = [frame.rollout.rollout.reward for frame in frames[:-1]]
    assert metrics["eval/reward"] == pytest.approx(sum(rewards) / 6)


async def test_a_silent_evaluation_beats(world, monkeypatch):
    """Invariant 7: every stream has a heartbeat."""
    monkeypatch.setattr(kit_stream.with_heartbeats, "__defaults__", (0.05,))
    world.host.stuck = {("toy", 0)}
    async with serving(world) as stub:
        await submit(stub, world.toml(evals=0))
        beats = []
        async with asyncio.timeout(60), aclosing(evaluate(stub)) as frames:
            async for frame in frames:
                beats += [frame.heartbeat.in_flight] if frame.HasField("heartbeat") else []
                # Before the others have ended there may be beats, too.
                if beats[-3:] == [2, 2, 2]:
                    break
    assert beats[-3:] == [2, 2, 2]


async def test_what_cannot_be_measured_is_said(world):
    async with serving(world) as stub:
        assert (await refused(stub)).reason == "RUN_UNKNOWN"
        world.host.stuck = {("toy", 0)}
        await submit(stub, world.toml())
        await submit(stub, world.toml(), run_id="second")
        waiting = await refused(stub, run_id="second")
        assert waiting.reason == "RUN_NOT_SERVED" and "waits for its turn" in waiting.message
        misspelt = await refused(stub, "num_example = 3")
        assert (misspelt.reason, misspelt.metadata["key"]) == ("INVALID_CONFIG", "num_example")
        assert "num_examples" in misspelt.metadata["remedy"]
        assert (await refused(stub, "num_examples = 0")).metadata["key"] == "num_examples"
        assert (await refused(stub, "interval = 2")).metadata["key"] == "interval"
        assert (
            "max_concurrent = 2"
            in (await refused(stub, "max_concurrent = 2\nrollouts_per_example = 3")).message
        )
        unknown = await refused(stub, '[[env]]\nid = "nowhere"')
        assert unknown.reason == "ENVIRONMENT_UNKNOWN" and unknown.metadata["env_id"] == "nowhere"
        world.host.stuck.clear()
        await unary(stub.StopRun, pb.StopRunRequest(run_id=RUN), timeout_s=20)
        await over(stub)
        stopped = await refused(stub)
        assert stopped.reason == "RUN_NOT_SERVED" and "is STOPPED" in stopped.message


async def test_the_end_of_the_run_is_told(world):
    """on_demand.py 2: whoever measures a run that is stopped learns it at once."""
    world.host.stuck = {("toy", 0)}
    async with serving(world) as stub:
        await submit(stub, world.toml(evals=0))
        measuring = asyncio.create_task(refused(stub))
        await begun(world)
        await unary(stub.StopRun, pb.StopRunRequest(run_id=RUN), timeout_s=20)
        told = await measuring
        assert told.reason == "RUN_NOT_SERVED" and "came to its end" in told.message
        assert (await over(stub)).phase == pb.RUN_PHASE_STOPPED


async def test_what_is_asked_for_is_bounded(world, monkeypatch):
    """on_demand.py 3 and invariant 8."""
    monkeypatch.setattr(on_demand, "MAX_AT_ONCE", 1)
    monkeypatch.setattr(on_demand, "MAX_ROLLOUTS", 10)
    world.host.stuck = {("other", 0)}
    async with serving(world) as stub:
        await submit(stub, world.toml(evals=0))
        large = await refused(stub, "num_examples = 6\nrollouts_per_example = 2")
        said = (
            "num_examples = 6 is refused: 6 examples of 'toy' with 2 rollouts each are 12 rollouts; ask for"
        )
        assert large.reason == "INVALID_CONFIG" and said in large.message
        several = await refused(stub, ASKED.replace("rollouts_per_example = 2", "rollouts_per_example = 3"))
        said = (
            "num_examples = 3 is refused: 3 examples of 'easy' with 3 rollouts each, and those of 1 more, are"
        )
        assert said in several.message
        with monkeypatch.context() as patched:
            patched.setattr(on_demand, "UNREAD_BYTES", 60)
            unread = await refused(stub)
        assert unread.reason == "OVERLOADED" and "left unread" in unread.message
        before = len(asked_for(world))
        call = asyncio.create_task(refused(stub))
        await begun(world, before + 1)
        second = await refused(stub)
        assert second.reason == "OVERLOADED" and "ask again later" in second.message
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (await over(stub)).phase == pb.RUN_PHASE_COMPLETED


async def test_a_service_that_stays_away_ends_it(world):
    """It is the run's patience, and the caller gets a reason that says so."""
    world.patience_s = 0.3
    world.host.kind = rpb.FAILURE_KIND_MODEL
    world.host.stuck = {("toy", 0)}
    async with serving(world) as stub:
        await submit(stub, world.toml(evals=0))
        measuring = asyncio.create_task(refused(stub))
        await begun(world)
        await world.kill("host")
        told = await measuring
        assert told.reason in ("NOT_READY", "RUN_NOT_SERVED"), told
        assert (await over(stub)).phase == pb.RUN_PHASE_STOPPED


async def test_an_environment_that_is_broken_for_who_asks_is_no_outage_of_the_run(world, monkeypatch):
    """on_demand.py 2: the run has no note of it, and its patience is not spent."""
    monkeypatch.setattr(outage, "NOTE_AFTER_S", 0.05)
    world.patience_s = 0.5
    rollouts = world.host._rollouts

    async def or_broken(request, members):
        if request.environment.id == "broken":
            raise QuartetError("ENVIRONMENT_UNAVAILABLE", "its data is away", env_id="broken")
        async for rollout in rollouts(request, members):
            yield rollout

    monkeypatch.setattr(world.host, "_rollouts", or_broken)
    async with serving(world) as stub:
        await submit(stub, world.toml(evals=0, steps=20))
        told = await refused(stub, 'num_examples = 1\n[[env]]\nid = "broken"')
        assert told.reason == "NOT_READY" and "its data is away" in told.message
        run = await over(stub)
        seen = stream(stub.WatchRun(pb.WatchRunRequest(run_id=RUN)), idle_timeout_s=20)
        assert "note" not in [event.WhichOneof("kind") async for event in seen]
    assert_complete(world, run, steps=20)
