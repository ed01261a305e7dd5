"""Runs as Prometheus sees them, read off the endpoint."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Iterator

import pytest
from orch_world import RUN, until
from prometheus_client.parser import text_string_to_metric_families
from quartet.kit.metrics import MetricsServer, scraped, start_metrics
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator.activity import Activity
from quartet_orchestrator.book import Book
from quartet_orchestrator.gauges import MAX_RUNS, Glance, RunGauges, UnderWay, shown
from quartet_orchestrator.held import Held
from quartet_orchestrator.state import RunState

Found = dict[tuple[str, str, str], float]


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = start_metrics("127.0.0.1:0")
    yield server
    server.close()


def scrape(port: int) -> Found:
    """Of the runs: value by series, run, and the other label."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))

    def key(name: str, labels: dict[str, str]) -> tuple[str, str, str]:
        of = labels.pop("run", "")
        return name, of, "".join(labels.values())

    return {
        key(sample.name, dict(sample.labels)): sample.value
        for family in families
        for sample in family.samples
        if family.name.startswith("quartet_run")
    }


async def test_the_last_step_and_evaluation_of_a_run(world, server) -> None:
    """gauges.py 1 and 4."""
    async with world.orchestrator() as runs:
        with scraped(RunGauges(runs.glances)):
            found = await asyncio.to_thread(scrape, server.port)
            assert {name for name, _, _ in found} == {"quartet_runs"} and not any(found.values())
            await runs.submit(RUN, world.toml(), dry_run=False)
            await world.rest(runs)
            found = await asyncio.to_thread(scrape, server.port)
        book = runs.get(RUN)
        last = dict(book.state.metrics)
        assert await asyncio.to_thread(scrape, server.port) == {}, "the next orchestrator registers its own"
    async with world.orchestrator() as runs:
        assert dict(runs.get(RUN).state.metrics) == last, "read off the journal"
    assert {name: found["quartet_run_metric", RUN, name] for name in last} == last
    for name in ("train/reward", "train/loss", "train/learning_rate", "rollout/mean_length", "eval/reward"):
        assert ("quartet_run_metric", RUN, name) in found
    assert found["quartet_run_steps", RUN, ""] == found["quartet_run_max_steps", RUN, ""] == 4
    assert found["quartet_run_rollouts", RUN, "trained"] == 32
    assert found["quartet_run_phase", RUN, "COMPLETED"] == found["quartet_runs", "", "COMPLETED"] == 1


async def test_what_was_given_up_is_told_by_reason(world) -> None:
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        await world.rest(runs)
        state = runs.get(RUN).state
    for reason in ("no_spread", "stale"):
        state.ledger.dispatch(len(reason))
        state.ledger.discard(len(reason), reason)
    told = {
        sample.labels["reason"]: sample.value
        for family in RunGauges(lambda: [Glance(state)]).collect()
        for sample in family.samples
        if sample.name == "quartet_run_discarded"
    }
    assert told == dict(state.ledger.discarded) and told.keys() >= {"no_spread", "stale"}


async def test_where_a_run_stands_and_what_it_waits_for(world, server) -> None:
    """gauges.py 3."""
    world.host.max_delay_s = 1e9
    async with world.orchestrator() as runs, asyncio.timeout(90):
        with scraped(RunGauges(runs.glances)):
            for run_id in (RUN, "queued"):
                await runs.submit(run_id, world.toml(evals=0), dry_run=False)

            def stands_still() -> bool:
                """What it has sent out is written down, and nothing from then on."""
                at = runs.glances()[0].under_way
                return at.activity is Activity.ROLLOUTS and time.monotonic() - at.moved_at > 0.25

            await until(stands_still)
            found = await asyncio.to_thread(scrape, server.port)
            runs.stop(RUN)
            await world.rest(runs)
            stopped = await asyncio.to_thread(scrape, server.port)
            await runs.resume(RUN)
            resumed = await asyncio.to_thread(scrape, server.port)
            for run_id in (RUN, "queued"):
                runs.stop(run_id)
                await world.rest(runs, run_id)

    def ones(family: str, of: str, found: Found) -> list[str]:
        return [what for (name, run, what), value in found.items() if (name, run) == (family, of) and value]

    assert ones("quartet_run_phase", RUN, found) == ["TRAINING"]
    assert ones("quartet_run_activity", RUN, found) == ["ROLLOUTS"]
    assert 0.2 <= found["quartet_run_since_step_seconds", RUN, ""] < 90
    assert 0.2 <= found["quartet_run_still_seconds", RUN, ""] < 90
    left = found["quartet_run_rollouts", RUN, "in_flight"]
    assert left > 0 and found["quartet_run_rollouts", RUN, "kept"] == 0
    assert ones("quartet_run_phase", "queued", found) == ["PENDING"]
    assert ones("quartet_run_activity", "queued", found) == ["TURN"]
    assert ("quartet_run_since_step_seconds", "queued", "") not in found, "it waits for its turn"

    assert ones("quartet_run_phase", RUN, stopped) == ["STOPPED"]
    assert not [name for name, run, _ in stopped if run == RUN and name.endswith(("activity", "seconds"))]
    assert stopped["quartet_run_rollouts", RUN, "in_flight"] == 0
    assert stopped["quartet_run_rollouts", RUN, "kept"] == left
    assert resumed["quartet_run_rollouts", RUN, "in_flight"] == 0, "it waits behind the other one"
    assert stopped["quartet_runs", "", "STOPPED"] == 1


async def test_a_run_that_was_set_aside_has_failed(world, server) -> None:
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=1, evals=0), dry_run=False)
        await world.rest(runs)
    segment = world.folder / "runs" / RUN / "000001.seg"
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    async with world.orchestrator() as runs:
        with scraped(RunGauges(runs.glances)):
            found = await asyncio.to_thread(scrape, server.port)
        # As a thread may find them while one is opened.
        runs._held[RUN] = Held(Book(world.folder / "runs" / "another"), None)
        assert [one.state.phase for one in runs.glances()] == [pb.RUN_PHASE_UNSPECIFIED]
    assert found["quartet_run_phase", RUN, "FAILED"] == found["quartet_runs", "", "FAILED"] == 1


def test_time_without_a_step_begins_with_the_turn_and_the_phase() -> None:
    now, now_ms = time.monotonic(), round(time.time() * 1000)

    def since(turn_s: float, phase_s: float, step_s: float | None) -> float:
        run = RunState(run_id=RUN, phase=pb.RUN_PHASE_TRAINING, phase_at_ms=now_ms - round(phase_s * 1000))
        run.last_step_at_ms = 0 if step_s is None else now_ms - round(step_s * 1000)
        glance = Glance(run, UnderWay(Activity.TRAINING, now - turn_s, now - turn_s))
        (family,) = [
            one
            for one in RunGauges(lambda: [glance]).collect()
            if one.name == "quartet_run_since_step_seconds"
        ]
        return round(family.samples[0].value)

    assert since(900, 800, None) == 800, "it was evaluated before"
    assert since(900, 800, 70) == 70
    assert since(5, 90000, 80000) == 5, "resumed, or taken up again, a day later"


def test_series_are_bounded_and_those_under_way_come_first() -> None:
    """gauges.py 2."""
    old = Glance(RunState(run_id="old", phase=pb.RUN_PHASE_TRAINING, submitted_at_ms=1))
    over = [
        # Who came first ended last.
        Glance(
            RunState(
                run_id=str(age),
                phase=pb.RUN_PHASE_COMPLETED,
                submitted_at_ms=100 - age,
                phase_at_ms=200 + age,
            )
        )
        for age in range(2, 99)
    ]
    unread = [Glance(RunState(run_id=f"unread-{n}", phase=pb.RUN_PHASE_PENDING)) for n in range(MAX_RUNS)]
    names = [run.state.run_id for run in shown([*unread, *over, old])]
    assert names[:3] == ["old", "98", "97"] and len(names) == MAX_RUNS
    assert len(shown([*unread, old])) == MAX_RUNS, "where there is room they are told"
    counted = {
        sample.labels["phase"]: sample.value
        for sample in next(iter(RunGauges(lambda: [*over, old]).collect())).samples
    }
    assert counted["COMPLETED"] == 97 and counted["TRAINING"] == 1
