"""Spans of rollouts: of the front, of its workers, and of what these ask inference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hosting
import pytest
import scripted_inference
from quartet.kit import tracing
from quartet.v1 import envhost_service_pb2
from rollout_outcomes import kind
from span_collector import Collector, collecting_here

pytestmark = pytest.mark.asyncio(loop_scope="session")
MODES = hosting.modes("trial_env")
RUN = "quartet.v1.EnvHostService/RunRollouts"
GENERATE = "quartet.v1.InferenceService/Generate"
#: Of an interpreter that has no packages of traces, whatever else it has.
WITHOUT = "import sys\nsys.modules['opentelemetry.sdk'] = None\n"


@pytest.fixture(scope="module")
def collecting() -> Iterator[Collector]:
    """One for all tests: workers that export to it have a template in common."""
    with pytest.MonkeyPatch.context() as patched, collecting_here(patched) as running:
        yield running


@pytest.fixture
def collector(collecting: Collector) -> Collector:
    """Nobody that exports to it is left of another test."""
    collecting.spans.clear()
    return collecting


async def run(
    python: str, once_file: Path, *modes: str, templates: Any = None, more_path: str = ""
) -> list[Any]:
    """The rollouts of a group of two for each mode, one after the other, of a host and an inference here."""
    paths = [str(hosting.ENVIRONMENTS), *filter(None, [more_path])]
    inference = await scripted_inference.serve_scripted(scripted_inference.ScriptedInference())
    settings = {
        "inference_addresses": [inference.address],
        "python": python,
        "environments": {"trial-env": {"env": {"PYTHONPATH": ":".join(paths)}}},
    }
    rollouts = []
    with tracing.exporting("test"):
        async with hosting.serving(settings, templates) as (_host, stub):
            for number, mode in enumerate(modes):
                request = envhost_service_pb2.RunRolloutsRequest(
                    run_id="run",
                    request_id=f"request-{number}",
                    environment={"id": "trial-env", "args_json": f'{{"once_file": "{once_file}"}}'},
                    members=[0, 1],
                    task_index=MODES.index(mode),
                    timeout_ms=10_000,
                )
                with tracing.span("group", root=True, group=number):
                    frames = [frame async for frame in stub.RunRollouts(request, timeout=60)]
                rollouts += [frame.rollout for frame in frames if frame.HasField("rollout")]
        await inference.stop(0)
    return rollouts


async def test_all_that_a_rollout_does_is_below_it(
    envs_python: str, templates_of_all: Any, tmp_path: Path, collector: Collector
) -> None:
    assert len(await run(envs_python, tmp_path / "once", "two_turns", templates=templates_of_all)) == 2
    rollouts = collector.named("rollout")
    for rollout in rollouts:
        assert collector.above(rollout)[:1] == [f"quartet-test SERVER {RUN}"]
        assert rollout.attributes["quartet.env"] == "trial-env"
        assert (rollout.attributes["quartet.task_index"], rollout.status) == (MODES.index("two_turns"), "")
    assert sorted(one.attributes["quartet.member"] for one in rollouts) == [0, 1]
    # The first turns of a group are one call, below one of them, which names the others: or two, where a new
    # worker took longer to begin the second than the first one waits.
    turns = collector.named("turn")
    assert len(turns) == 6 and {collector.parent(turn) for turn in turns} == set(rollouts)
    joined = collector.named("first turns")
    links = [link for one in joined for link in one.links]
    assert len(links) == len(set(links)) == 2 and set(links) < {turn.span_id for turn in turns}
    calls = collector.named(GENERATE, "SERVER")
    worker = "quartet-envhost-worker"
    of_rollout = ["quartet-test INTERNAL rollout", f"quartet-test SERVER {RUN}", f"quartet-test CLIENT {RUN}"]
    of_turn = [f"{worker} INTERNAL turn", *of_rollout, "quartet-test INTERNAL group"]
    assert sorted(collector.above(call) for call in calls) == [
        *len(joined) * [[f"{worker} CLIENT {GENERATE}", f"{worker} INTERNAL first turns", *of_turn]],
        *4 * [[f"{worker} CLIENT {GENERATE}", *of_turn]],
    ]
    scored = collector.named("scoring")
    assert {collector.parent(one) for one in scored} == set(rollouts)


async def test_a_rollout_that_failed_says_how(
    envs_python: str, templates_of_all: Any, tmp_path: Path, collector: Collector
) -> None:
    """Also one whose worker died, of which the front alone knows."""
    rollouts = await run(envs_python, tmp_path / "once", "run_raises", "exits", templates=templates_of_all)
    told = {(one.attributes["quartet.failure"], one.status) for one in collector.named("rollout")}
    assert told == {(kind(rollouts[0]), "ERROR"), (kind(rollouts[2]), "ERROR")}
    assert {failure for failure, _ in told} == {"ENVIRONMENT", "HOST"}


async def test_a_worker_without_the_packages_runs_its_rollouts(
    envs_python: str, tmp_path: Path, collector: Collector, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its front knows that it takes no TRACE."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    rollouts = await run(envs_python, tmp_path / "once", "ok", more_path=str(tmp_path))
    assert [rollout.reward > 0 for rollout in rollouts] == [True, True]
    assert "no spans of worker" in capfd.readouterr().err
    assert len(collector.named("rollout")) == 2 and not collector.named("turn")
    assert {one.parent_id for one in collector.named(GENERATE, "SERVER")} == {""}


async def test_a_worker_that_exports_takes_rollouts_without_a_place(
    envs_python: str,
    templates_of_all: Any,
    tmp_path: Path,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a front that has no packages itself."""
    monkeypatch.setattr(tracing, "asked", lambda: False)
    assert len(await run(envs_python, tmp_path / "once", "ok", templates=templates_of_all)) == 2
    assert {one.service for one in collector.spans} == {"quartet-envhost-worker"}
    assert all(collector.parent(one) is None for one in collector.named("turn"))
