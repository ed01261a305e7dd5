"""Runs as Prometheus sees them, read off the endpoint."""

from __future__ import annotations

import asyncio
import urllib.request

from orch_world import RUN
from prometheus_client.parser import text_string_to_metric_families
from quartet.kit.metrics import start_metrics
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator.gauges import MAX_RUNS, scraped, shown
from quartet_orchestrator.state import RunState


def scrape(port: int) -> dict[tuple[str, str, str], float]:
    """Of the runs: value by series, run, and the other label."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, sample.labels["run"], sample.labels.get("name", sample.labels.get("state", ""))): (
            sample.value
        )
        for family in families
        for sample in family.samples
        if family.name.startswith("quartet_run_")
    }


async def test_the_last_step_and_evaluation_of_a_run(world) -> None:
    """gauges.py 1 and 3."""
    server = start_metrics("127.0.0.1:0")
    try:
        async with world.orchestrator() as runs:
            with scraped(runs.states):
                assert await asyncio.to_thread(scrape, server.port) == {}
                await runs.submit(RUN, world.toml(), dry_run=False)
                await world.rest(runs)
                found = await asyncio.to_thread(scrape, server.port)
            book = runs.get(RUN)
            last = dict(book.state.metrics)
            assert await asyncio.to_thread(scrape, server.port) == {}, (
                "the next orchestrator registers its own"
            )
        async with world.orchestrator() as runs:
            assert dict(runs.get(RUN).state.metrics) == last, "read off the journal"
    finally:
        server.close()
    assert {name: found["quartet_run_metric", RUN, name] for name in last} == last
    for name in ("train/reward", "train/loss", "train/learning_rate", "rollout/mean_length", "eval/reward"):
        assert ("quartet_run_metric", RUN, name) in found
    assert found["quartet_run_steps", RUN, ""] == 4
    assert found["quartet_run_rollouts", RUN, "trained"] == 32


def test_series_are_bounded_and_those_under_way_come_first() -> None:
    """gauges.py 2."""
    old = RunState(run_id="old", phase=pb.RUN_PHASE_TRAINING, submitted_at_ms=1)
    over = [
        RunState(run_id=str(age), phase=pb.RUN_PHASE_COMPLETED, submitted_at_ms=age) for age in range(2, 99)
    ]
    names = [run.run_id for run in shown([*over, old])]
    assert names[:3] == ["old", "98", "97"] and len(names) == MAX_RUNS
