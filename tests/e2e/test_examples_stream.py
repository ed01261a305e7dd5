"""examples/stream_rollouts as its README runs it: `quartet rl` without a trainer, and the example's trainer,
which is killed on the way. Somebody asks for an evaluation meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from quartet.v1.orchestrator_service_pb2 import EvaluateRequest, EvaluateResponse
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from quartet.v1.rollout_pb2 import PolicySpan

from tests.conftest import summary_of
from tests.stream_example import RUN, addresses, launch, running, steps_in, train, wait_until

pytestmark = pytest.mark.slow

SECONDS = 300  # a loaded machine takes many times the usual 30 s
STEPS = 6


@contextmanager
def evaluating(orchestrator: str, token_file: Path) -> Iterator[Iterator[EvaluateResponse]]:
    """What an evaluation says from its first heartbeat on."""
    request = EvaluateRequest(run_id=RUN, config_toml="num_examples = 4\nrollouts_per_example = 2")
    with grpc.insecure_channel(orchestrator, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = OrchestratorServiceStub(channel)  # type: ignore[no-untyped-call]
        shown = [("authorization", f"Bearer {token_file.read_text().strip()}")]
        frames = stub.Evaluate(request, timeout=SECONDS, metadata=shown)
        assert next(frames).HasField("heartbeat")
        yield frames


def spans_of(frame: EvaluateResponse) -> Iterator[PolicySpan]:
    return (span for sample in frame.rollout.rollout.samples for span in sample.spans)


@pytest.mark.timeout(4 * SECONDS)  # the model is made within it, too
def test_a_foreign_trainer_killed_on_the_way_trains_every_step_once(tiny_model: Path, tmp_path: Path) -> None:
    """Invariants 2 and 9 for a trainer that is not Quartet's."""
    output, state = tmp_path / "run", tmp_path / "state.pt"
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    with running(launch(tiny_model, output, STEPS), tmp_path / "rl.log") as launcher:
        wait_until(lambda: addresses(output), launcher, seconds=SECONDS)
        served = addresses(output)
        program = train(tiny_model, state, served)
        with running(program, first) as trainer:
            # Trained, on its disk, and not acknowledged.
            wait_until(lambda: 2 in steps_in(first), launcher, trainer, seconds=SECONDS)
        with (
            evaluating(served["orchestrator"], output / "data" / "token") as frames,
            running(program, second) as trainer,
        ):
            # It waited for the step that the dead trainer left, and the next step waits for it.
            *rollouts, last = (frame for frame in frames if not frame.HasField("heartbeat"))
            assert trainer.wait(SECONDS) == 0, second.read_text()
        assert launcher.wait(SECONDS) == 0, (tmp_path / "rl.log").read_text()
    assert last.result.policy_version == last.result.step == 2 and last.result.metrics["eval/coverage"] == 1
    assert {span.policy_version for one in rollouts for span in spans_of(one)} == {2} and len(rollouts) == 8
    trained = steps_in(first) + steps_in(second)
    assert trained == list(range(1, STEPS + 1))
    summary = summary_of(output)
    assert summary["phase"] == "completed" and summary["steps"] == STEPS
    assert summary["ledger"]["trained"] == STEPS * 64 and summary["ledger"]["in_flight"] == 0
    assert summary["max_off_policy_steps_seen"] <= 1
    assert summary["reward_after"] > summary["reward_before"]
