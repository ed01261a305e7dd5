"""examples/stream_rollouts as its README runs it: `quartet rl` without a trainer, and the example's trainer.
Invariants 2 and 9 for such a run: SIGKILL of it and of each service around it.

What its program printed is the record: no step twice, in order.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from quartet.v1.orchestrator_service_pb2 import EvaluateRequest, EvaluateResponse
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from quartet.v1.rollout_pb2 import PolicySpan

from tests.conftest import summary_of
from tests.faults.test_launcher import services_of
from tests.stream_example import RUN, addresses, launch, running, steps_in, train, wait_until

pytestmark = pytest.mark.usefixtures("imported_once")

VICTIMS = ("trainer", "inference", "envhost", "orchestrator")
STEPS = 14
# On a machine under test load; the replica is told the weights again after some seconds of silence.
STEP_SECONDS, RUN_SECONDS = 120, 400


@contextmanager
def evaluating(orchestrator: str, token_file: Path) -> Iterator[Iterator[EvaluateResponse]]:
    """What an evaluation says from its first heartbeat on."""
    request = EvaluateRequest(run_id=RUN, config_toml="num_examples = 4\nrollouts_per_example = 2")
    with grpc.insecure_channel(orchestrator, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = OrchestratorServiceStub(channel)  # type: ignore[no-untyped-call]
        shown = [("authorization", f"Bearer {token_file.read_text().strip()}")]
        frames = stub.Evaluate(request, timeout=STEP_SECONDS, metadata=shown)
        assert next(frames).HasField("heartbeat")
        yield frames


def spans_of(frame: EvaluateResponse) -> Iterator[PolicySpan]:
    return (span for sample in frame.rollout.rollout.samples for span in sample.spans)


@pytest.mark.timeout(RUN_SECONDS + 200)
def test_every_step_is_trained_once_whoever_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    """First the trainer between two steps, while somebody asks for an evaluation; then everybody, at any
    moment."""
    seed = int(os.environ.get("QUARTET_FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"QUARTET_FAULT_SEED={seed}")
    chance = random.Random(seed)
    output, printed = tmp_path / "run", tmp_path / "train.log"
    with ExitStack() as processes:
        launcher = processes.enter_context(running(launch(tiny_model, output, STEPS), tmp_path / "rl.log"))
        wait_until(lambda: addresses(output), launcher, seconds=STEP_SECONDS)
        served = addresses(output)
        program = train(tiny_model, tmp_path / "state.pt", served)
        with running(program, printed) as trainer:
            # Trained, on its disk, and not acknowledged.
            wait_until(lambda: 2 in steps_in(printed), launcher, trainer, seconds=STEP_SECONDS)
        with evaluating(served["orchestrator"], output / "data" / "token") as frames:
            trainer = processes.enter_context(running(program, printed))
            # It waited for the step that the dead trainer left, and the next step waits for it.
            *rollouts, last = (frame for frame in frames if not frame.HasField("heartbeat"))
        assert last.result.policy_version == last.result.step == 2
        assert last.result.metrics["eval/coverage"] == 1
        assert {span.policy_version for one in rollouts for span in spans_of(one)} == {2}
        assert len(rollouts) == 8
        wait_until(lambda: 3 in steps_in(printed), launcher, trainer, seconds=STEP_SECONDS)
        assert steps_in(printed)[:3] == [1, 2, 3]
        for victim in chance.sample(VICTIMS, len(VICTIMS)):
            before = len(steps_in(printed))
            assert before < STEPS - 1, "the run ended before everybody was killed; raise STEPS"
            time.sleep(chance.uniform(0.0, 1.0))
            if victim == "trainer":
                trainer.kill()
                trainer.wait()
                trainer = processes.enter_context(running(program, printed))
            else:
                pids = services_of(output, f"{victim}.toml")
                assert len(pids) == 1, f"of {victim} there are the processes {pids}"
                os.kill(pids[0], signal.SIGKILL)
            wanted = min(before + 2, STEPS)
            wait_until(lambda: len(steps_in(printed)) >= wanted, launcher, seconds=STEP_SECONDS)  # noqa: B023 - at once
        assert trainer.wait(RUN_SECONDS) == 0, printed.read_text()[-4000:]
        assert launcher.wait(RUN_SECONDS) == 0, (tmp_path / "rl.log").read_text()[-4000:]
    # One may have been on the disk and not printed when the trainer was killed; none is there twice.
    told = steps_in(printed)
    assert told == sorted(set(told)) and len(told) >= STEPS - 1 and told[-1] == STEPS
    summary = summary_of(output)
    ledger = summary["ledger"]
    assert summary["phase"] == "completed" and summary["steps"] == STEPS
    assert ledger["trained"] == STEPS * 64 and ledger["in_flight"] == 0
    assert ledger["dispatched"] == ledger["trained"] + sum(ledger["discarded"].values())
    assert summary["max_off_policy_steps_seen"] <= 1
    assert summary["reward_after"] > summary["reward_before"]
