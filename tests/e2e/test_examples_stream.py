"""examples/stream_rollouts as its README runs it: `quartet rl` without a trainer, and the example's trainer,
which is killed on the way. Somebody asks for an evaluation meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from quartet.v1.orchestrator_service_pb2 import EvaluateRequest, EvaluateResponse
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from quartet.v1.rollout_pb2 import PolicySpan

from tests.conftest import QUARTET, REPOSITORY

pytestmark = pytest.mark.slow

EXAMPLE = REPOSITORY / "examples/stream_rollouts"
SECONDS = 300  # a loaded machine takes many times the usual 30 s
STEPS = 6
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process, its output in a file."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=ENVIRONMENT, text=True, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for(condition: object, *processes: subprocess.Popen[str]) -> None:
    """Until the condition holds; a process that ends before is the test's end."""
    deadline = time.monotonic() + SECONDS
    while not condition():  # type: ignore[operator]
        assert all(process.poll() is None for process in processes), "a process ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def evaluating(orchestrator: str) -> Iterator[Iterator[EvaluateResponse]]:
    """What an evaluation says from its first heartbeat on."""
    request = EvaluateRequest(run_id="foreign", config_toml="num_examples = 4\nrollouts_per_example = 2")
    with grpc.insecure_channel(orchestrator, options=[("grpc.enable_http_proxy", 0)]) as channel:
        frames = OrchestratorServiceStub(channel).Evaluate(request, timeout=SECONDS)  # type: ignore[no-untyped-call]
        assert next(frames).HasField("heartbeat")
        yield frames


def spans_of(frame: EvaluateResponse) -> Iterator[PolicySpan]:
    return (span for sample in frame.rollout.rollout.samples for span in sample.spans)


def steps_in(log: Path) -> list[int]:
    return [int(step) for step in re.findall(r"^step (\d+) ", log.read_text(), re.MULTILINE)]


@pytest.mark.timeout(4 * SECONDS)  # the model is made within it, too
def test_a_foreign_trainer_killed_on_the_way_trains_every_step_once(tiny_model: Path, tmp_path: Path) -> None:
    """Invariants 2 and 9 for a trainer that is not Quartet's."""
    output = tmp_path / "run"
    launch = [*QUARTET, "rl", "@", str(EXAMPLE / "run.toml"), "--model", str(tiny_model), "--plain"]
    launch += ["--run-id", "foreign", "--output-dir", str(output), "--max-steps", str(STEPS)]
    launch += [f"--{name}.server.address=127.0.0.1:0" for name in ("orchestrator", "inference")]
    ports = {name: output / "data" / f"{name}.port" for name in ("orchestrator", "inference")}
    train = [sys.executable, str(EXAMPLE / "train.py"), "--model", str(tiny_model)]
    train += ["--state", str(tmp_path / "state.pt")]
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with running(launch, tmp_path / "rl.log") as launcher:
        wait_for(lambda: all(port.exists() for port in ports.values()), launcher)
        train += [word for name, port in ports.items() for word in (f"--{name}", port.read_text().strip())]
        with running(train, first) as trainer:
            # Trained, on its disk, and not acknowledged.
            wait_for(lambda: 2 in steps_in(first), launcher, trainer)
        with (
            evaluating(ports["orchestrator"].read_text().strip()) as frames,
            running(train, second) as trainer,
        ):
            # It waited for the step that the dead trainer left, and the next step waits for it.
            *rollouts, last = (frame for frame in frames if not frame.HasField("heartbeat"))
            assert trainer.wait(SECONDS) == 0, second.read_text()
        assert launcher.wait(SECONDS) == 0, (tmp_path / "rl.log").read_text()
    assert last.result.policy_version == last.result.step == 2 and last.result.metrics["eval/coverage"] == 1
    assert {span.policy_version for one in rollouts for span in spans_of(one)} == {2} and len(rollouts) == 8
    trained = steps_in(first) + steps_in(second)
    assert trained == list(range(1, STEPS + 1))
    summary = json.loads((output / "summary.json").read_text())
    assert summary["phase"] == "completed" and summary["steps"] == STEPS
    assert summary["ledger"]["trained"] == STEPS * 64 and summary["ledger"]["in_flight"] == 0
    assert summary["max_off_policy_steps_seen"] <= 1
    assert summary["reward_after"] > summary["reward_before"]
