"""Environments that change between two parts of a run, while it works, or between two hosts (sameness.py)."""

from __future__ import annotations

import asyncio

import pytest
from orch_fakes import FakeHost
from orch_world import RUN, assert_complete, events
from quartet.kit.health import Health
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1.envhost_service_pb2_grpc import add_EnvHostServiceServicer_to_server
from quartet_orchestrator import envhosts
from quartet_orchestrator.sameness import MAX_MET, differences
from quartet_orchestrator.service import to_response
from quartet_orchestrator.state import RESTING

FIRST = epb.EnvironmentInfo(
    api="v1",
    version="0.1.0",
    verifiers_version="0.4.0",
    digest="aaaa",
    files={"toy/__init__.py": "1", "toy/scoring.py": "2"},
    examples_digest="e",
)


def another(digest: str, **files: str) -> epb.EnvironmentInfo:
    """The environment with files that are other ones, and a digest of it all."""
    now = epb.EnvironmentInfo()
    now.CopyFrom(FIRST)
    now.digest = digest
    for name, content in files.items():
        now.files[f"toy/{name}.py"] = content
    return now


async def warnings(runs) -> list[str]:
    seen = [to_response(record) for record in await events(runs)]
    return [one.note.message for one in seen if one.note.level == pb.NOTE_LEVEL_WARNING]


async def stopped_after(world, steps: int, toml: str) -> None:
    """A run that somebody stops, and its orchestrator with it."""
    world.trainer.delay_s = 0.02
    async with world.orchestrator() as runs:
        await runs.submit(RUN, toml, dry_run=False)
        while runs.get(RUN).state.step < steps:
            await runs.get(RUN).changed()
        runs.stop(RUN)
        assert (await world.rest(runs)).phase == pb.RUN_PHASE_STOPPED
        assert await warnings(runs) == []


async def test_a_change_between_a_stop_and_a_resume_is_told_once(world):
    """sameness.py 1: before its first rollout counts, and not again after the next restart."""
    world.host.loaded = FIRST
    await stopped_after(world, 2, world.toml(steps=6))
    world.host.loaded = another("bbbb", scoring="3")
    async with world.orchestrator() as runs:
        before = runs.get(RUN).journal.last_number
        await runs.resume(RUN)
        while runs.get(RUN).state.step < 4:
            await runs.get(RUN).changed()
        (told,) = await warnings(runs)
        what = "source changed (toy/scoring.py), digest aaaa -> bbbb; rewards from here on may mean"
        where = f"environment 'toy' at the host {world.addresses['host']} is not what the run began with"
        assert told.startswith(f"{where}: {what}"), told
        later = [record for record in await events(runs, rollouts=True) if record.number > before]
        kinds = [record.WhichOneof("kind") for record in later]
        assert kinds.count("met") == 1 and kinds.index("met") < kinds.index("rollout")
    async with world.orchestrator() as runs:  # goes on by itself
        assert_complete(world, await world.rest(runs), steps=6)
        assert len(await warnings(runs)) == 1
        (environment,) = runs.status(RUN).environments
        assert environment == pb.RunEnvironment(
            id="toy", version="0.1.0", digest="aaaa", later_digests=["bbbb"]
        )
        (phase,) = [e.phase.run for e in await events(runs) if e.phase.run.phase == pb.RUN_PHASE_COMPLETED]
        assert list(phase.environments) == [environment]


async def test_a_host_that_loads_anew_while_a_run_works_is_noticed(world):
    """sameness.py 1: a version, with the examples; and what is put back is what the run knows."""
    world.host.loaded, world.trainer.delay_s = FIRST, 0.02
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        for step, loaded in ((2, another("cccc")), (4, FIRST)):
            while runs.get(RUN).state.step < step:
                await runs.get(RUN).changed()
            world.host.loaded = loaded
            world.host.loaded.version = "0.2.0" if step == 2 else "0.1.0"
            world.host.loaded.examples_digest = "f" if step == 2 else "e"
        assert_complete(world, await world.rest(runs), steps=6)
        (told,) = await warnings(runs)
        assert "version 0.1.0 -> 0.2.0, its examples, digest aaaa -> cccc; rewards" in told
        assert len(world.host.described) == 2, "at the submission, and where it was another"


async def test_a_run_that_is_to_stop_trains_nothing_of_another_environment(world):
    """sameness.py 2: nor does it go on by a resume alone, but by the other setting, or by what was there."""
    toml = world.toml(steps=6, on_environment_change='"stop"')
    world.host.loaded = FIRST
    await stopped_after(world, 2, toml)
    world.host.loaded = another("bbbb", scoring="3", judge="4")
    async with world.orchestrator() as runs:
        rollouts = len(await events(runs, rollouts=True)) - len(await events(runs))
        for _ in range(2):
            await runs.resume(RUN)
            run = await world.rest(runs)
            assert run.phase == pb.RUN_PHASE_STOPPED
            assert "source changed (toy/judge.py, toy/scoring.py)" in run.error, run.error
            assert (
                'put back what was there and resume the run, or go on with on_environment_change = "warn"'
                in (run.error)
            )
        assert len(await events(runs, rollouts=True)) - len(await events(runs)) == rollouts
        world.host.loaded = FIRST
        await runs.resume(RUN)
        while runs.get(RUN).state.step < 3:
            await runs.get(RUN).changed()
        world.host.loaded = another("dddd", scoring="5")
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_STOPPED and "digest aaaa -> dddd" in run.error
        await runs.submit(RUN, world.toml(steps=6, on_environment_change='"warn"'), dry_run=False)
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=6)
        (told,) = await warnings(runs)
        assert "digest aaaa -> dddd" in told


async def test_two_hosts_that_differ_are_told_by_the_address_of_one(world):
    """sameness.py 1, envhosts.py 5: one warning, however often each of a fleet says it."""

    world.host.loaded = FIRST
    other = FakeHost(world.trainer)
    other.loaded = another("bbbb", scoring="3")
    service = Service("fake.other", add_EnvHostServiceServicer_to_server, other)
    server = await start([service], ServerConfig(), Health())
    world.more_hosts = [server.address]
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=4), dry_run=False)
        assert_complete(world, await world.rest(runs))
        (told,) = await warnings(runs)
    assert len(world.host.requests) > 3 and len(other.requests) > 3
    # Of two that are idle the first is asked, when the run is submitted.
    assert f"at the host {server.address} is not what" in told and "aaaa -> bbbb" in told, told
    assert world.host.described == other.described == ["toy"]
    await server.stop(0)


async def test_a_host_of_an_earlier_release_is_passed(world):
    """sameness.py 3: it tells nothing; and the first that tells something is no change."""
    await stopped_after(world, 1, world.toml(steps=6))
    async with world.orchestrator() as runs:
        await runs.resume(RUN)
        while runs.get(RUN).state.step < 3:
            await runs.get(RUN).changed()
        assert list(runs.status(RUN).environments) == [pb.RunEnvironment(id="toy")]
        world.host.loaded = FIRST
        while runs.get(RUN).state.step < 5:
            await runs.get(RUN).changed()
        world.host.loaded = another("bbbb", scoring="3")
        assert_complete(world, await world.rest(runs), steps=6)
        told = [to_response(r).note for r in await events(runs) if r.WhichOneof("kind") == "met"]
        assert [note.level for note in told] == [pb.NOTE_LEVEL_INFO, pb.NOTE_LEVEL_WARNING][: len(told)]
        assert told[0].message.endswith("has the digest aaaa")


async def test_an_environment_that_is_another_at_every_load_is_told_so_often(world):
    """sameness.py 4"""
    world.host.loaded, world.trainer.delay_s = FIRST, 0.01
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=20, evals=0), dry_run=False)
        while runs.get(RUN).state.phase not in RESTING:
            world.host.loaded = another(f"{len(world.host.requests):04}")
            await runs.get(RUN).changed()
        assert_complete(world, runs.status(RUN), steps=20)
        told = await warnings(runs)
    assert len(told) == MAX_MET
    assert [one.endswith("further ones are not told") for one in told] == [False] * (MAX_MET - 1) + [True]


async def test_a_host_that_does_not_describe_it_is_not_waited_for(world, monkeypatch):
    """sameness.py 1: what it told with its rollouts is enough."""
    world.host.loaded = FIRST
    await stopped_after(world, 2, world.toml(steps=6))
    world.host.loaded = epb.EnvironmentInfo(digest="bbbb")
    world.host.describing["toy"] = asyncio.Event()
    monkeypatch.setattr(envhosts, "DESCRIBE_LOADED_S", 0.2)
    async with world.orchestrator() as runs:
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs), steps=6)
        (told,) = await warnings(runs)
        assert "began with: digest aaaa -> bbbb; rewards" in told


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ({"version": ""}, "version 0.1.0 -> none"),
        ({"verifiers_version": "0.4.1"}, "Verifiers 0.4.0 -> 0.4.1"),
        ({"examples_digest": "f", "train_size": 9}, "its examples (0 and 0 -> 9 and 0)"),
        (
            {"files": {f"toy/{n}.py": "1" for n in range(6)}},
            "source changed (toy/0.py, toy/1.py, toy/2.py, toy/3.py and 2 more)",
        ),
        ({"metrics": ["length"]}, "its rewards (none -> length)"),
        ({}, None),
    ],
)
def test_what_is_different_is_named(now, told):
    found = another("bbbb")
    files = now.pop("files", {})
    found.metrics.extend(now.pop("metrics", ()))
    for name, value in now.items():
        setattr(found, name, value)
    for name, content in files.items():
        found.files[name] = content
    assert differences(FIRST, found) == [*([told] if told else []), "digest aaaa -> bbbb"]
