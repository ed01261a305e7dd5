"""A run as a collector of traces has it: where the time of its steps and of its rollouts went."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from quartet.kit.tracing import UNTRACED
from span_collector import Collected, Collector, collecting

from tests.conftest import REPOSITORY
from tests.e2e.conftest import quartet

pytestmark = pytest.mark.usefixtures("imported_once")

STEPS = 2
GROUP = 8
CLOSED = "http://127.0.0.1:9"  # where nobody listens
GENERATE = "quartet.v1.InferenceService/Generate"
ROLLOUTS = "quartet.v1.EnvHostService/RunRollouts"
WORKER = "quartet-envhost-worker"
#: Of the calls that are roots.
OF_A_RUN = {"SubmitRun", "CreateRun", "UnloadAdapter", "PublishWeights", "SaveState", "CloseRun"}
#: Their requests name no run; what is asked of them for one does.
WITHOUT_A_RUN = {
    "quartet-envhost SERVER quartet.v1.EnvHostService/DescribeEnvironment",
    "quartet-trainer SERVER quartet.v1.TrainerService/CheckRun",
}


@dataclass(frozen=True)
class Traced:
    """A run that has ended, and all its spans."""

    output: Path
    collector: Collector

    def below(self, span: Collected) -> list[Collected]:
        return [one for one in self.collector.spans if one.parent_id == span.span_id]


def run(model: Path, output: Path, steps: int, **variables: str) -> None:
    command = ["rl", "@", "configs/reverse-text.toml", "--model", model, "--output-dir", output]
    command += ["--max-steps", str(steps), "--warmup-steps", "0", "--batch-size", str(2 * GROUP)]
    # What is trained changes the weights, although an untaught model earns nothing; and they are fetched.
    command += ["--weight-decay", "0.5", "--inference.shared-memory", "false", "--eval.num-examples", "4"]
    done = quartet(*command, **variables)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def traced(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    output = tmp_path_factory.mktemp("traced") / "run"
    with collecting() as collector:
        run(random_model, output, STEPS, **collector.variables)
    return Traced(output, collector)


def test_every_span_has_its_parent(traced: Traced) -> None:
    """Nothing is lost at the end of a service, and no root is there by mistake."""
    spans = traced.collector.spans
    known = {one.span_id for one in spans}
    assert [one.said for one in spans if one.parent_id and one.parent_id not in known] == []
    assert {one.service for one in spans} == {
        *("quartet-orchestrator", "quartet-envhost", WORKER, "quartet-inference", "quartet-trainer")
    }
    roots = Counter(one.name for one in spans if not one.parent_id)
    assert (roots["step"], roots["group"], roots["evaluated example"]) == (STEPS, 2 * STEPS, 8)
    assert [one.said for one in spans if one.kind == "SERVER" and not one.parent_id] == [
        "quartet-orchestrator SERVER quartet.v1.OrchestratorService/SubmitRun"  # of a client without traces
    ]
    assert not {f"/{one.name}" for one in spans} & UNTRACED
    assert [one.said for one in spans if one.status] == []


def test_what_a_rollout_asks_of_inference_is_below_it(traced: Traced) -> None:
    collector = traced.collector
    calls = collector.named(GENERATE, "SERVER")
    rollouts = collector.named("rollout")
    assert calls and len(rollouts) >= 2 * STEPS * GROUP
    for call in calls:
        assert call.service == "quartet-inference" and call.events == ("queued", "first_token")
        assert collector.above(call)[:-1] == [
            f"{WORKER} CLIENT {GENERATE}",
            f"{WORKER} INTERNAL first turns",
            f"{WORKER} INTERNAL turn",
            "quartet-envhost INTERNAL rollout",
            f"quartet-envhost SERVER {ROLLOUTS}",
            f"quartet-orchestrator CLIENT {ROLLOUTS}",
        ]
    for rollout in rollouts:
        assert {"turn", "scoring"} <= {one.name for one in traced.below(rollout)}
        assert rollout.attributes["quartet.stop_condition"] == "agent_completed"
    (group,) = [one for one in collector.named("group") if one.attributes["quartet.group"] == 0]
    of_group = [one for one in rollouts if one.trace_id == group.trace_id]
    assert sorted(one.attributes["quartet.member"] for one in of_group) == list(range(GROUP))
    assert group.attributes["quartet.env"] == "reverse-text" and group.attributes["quartet.step"] == 1


def test_a_step_has_what_is_asked_of_the_trainer_below_it(traced: Traced) -> None:
    collector = traced.collector
    steps = sorted(collector.named("step"), key=lambda one: one.start_ns)
    assert [one.attributes["quartet.step"] for one in steps] == [1, 2]
    assert [one.attributes["quartet.policy_version"] for one in steps] == [0, 1]
    service = "quartet.v1.TrainerService"
    for step in steps:
        below = sorted(traced.below(step), key=lambda one: one.start_ns)
        calls = [f"{service}/{name}" for name in ("ForwardBackward", "OptimStep", "PublishWeights")]
        assert [one.name for one in below] == ["rollouts", *calls]
        for client in below[1:]:
            (server,) = traced.below(client)
            (compute,) = traced.below(server)
            assert (server.service, compute.name) == ("quartet-trainer", "compute")
            assert client.start_ns <= server.start_ns <= compute.start_ns
            assert compute.end_ns <= server.end_ns <= client.end_ns


def test_weights_come_with_a_trace_of_their_own(traced: Traced) -> None:
    collector = traced.collector
    taken = {one.attributes["quartet.version"]: one for one in collector.named("weights")}
    assert set(taken) == set(range(STEPS + 1))
    names = [one.name for one in traced.below(taken[STEPS])]
    fetch = "quartet.v1.WeightService/Fetch"
    assert "swap" in names and fetch in names
    (served,) = [one for one in collector.named(fetch, "SERVER") if one.trace_id == taken[STEPS].trace_id]
    assert served.service == "quartet-trainer"


def test_every_span_says_of_which_run_it_is(traced: Traced) -> None:
    """docs/tracing.md: one search finds a step as a whole; what is of no run is listed here."""
    without = {one.said for one in traced.collector.spans if "quartet.run_id" not in one.attributes}
    assert without == WITHOUT_A_RUN
    assert {one.attributes.get("quartet.run_id", "run") for one in traced.collector.spans} == {"run"}


def test_roots_are_those_that_the_page_has(traced: Traced) -> None:
    """docs/tracing.md"""
    page = (REPOSITORY / "docs/tracing.md").read_text()
    table = page.split("## What one sees")[1].split("\n\n")[1]
    told = {name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    roots = {one.name.rpartition("/")[2] for one in traced.collector.spans if not one.parent_id}
    assert roots == told & (roots | OF_A_RUN), roots ^ told


def test_attributes_are_those_that_the_page_has(traced: Traced) -> None:
    """docs/tracing.md"""
    page = (REPOSITORY / "docs/tracing.md").read_text()
    ours = {name for one in traced.collector.spans for name in one.attributes if name.startswith("quartet.")}
    assert {
        name for name in ours if not re.search(rf"`(quartet\.)?{name[len('quartet.') :]}`", page)
    } == set()


def test_the_logs_name_the_trace(traced: Traced) -> None:
    log = (traced.output / "logs/inference.log").read_text().splitlines()
    lines = [json.loads(line) for line in log if line.startswith("{")]
    (line,) = [one for one in lines if one["event"] == "serving version" and one["version"] == STEPS]
    of_trace = [one for one in traced.collector.named("weights") if one.trace_id == line["trace_id"]]
    assert [one.attributes["quartet.version"] for one in of_trace] == [STEPS]


@pytest.mark.parametrize("service", ["trainer", "orchestrator", "inference", "envhost"])
def test_packages_that_are_missing_are_told_at_once(service: str, random_model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['opentelemetry.sdk'] = None\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OTEL_EXPORTER_OTLP_ENDPOINT": CLOSED}
    asked = ["--server.address", "127.0.0.1:0", *_needed(service, random_model, tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", f"quartet_{service}", *asked],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: traces are asked for"), done.stderr
    assert "pip install './sdk[otel]'" in done.stderr


def _needed(service: str, model: Path, folder: Path) -> list[str]:
    return {
        "trainer": ["--state_dir", str(folder)],
        "orchestrator": [
            *("--data_dir", str(folder), "--trainer_address", "127.0.0.1:1"),
            *("--envhost_addresses", '["127.0.0.1:1"]', "--inference_addresses", '["127.0.0.1:1"]'),
        ],
        "inference": ["--model", str(model)],
        "envhost": ["--inference_addresses", '["127.0.0.1:1"]'],
    }[service]
