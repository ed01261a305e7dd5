"""The events of a whole small run."""

from __future__ import annotations

from quartet.v1.common_pb2 import Message, Usage
from quartet.v1.orchestrator_service_pb2 import (
    RUN_PHASE_COMPLETED,
    RUN_PHASE_TRAINING,
    EvalEvent,
    GroupFate,
    Ledger,
    PhaseEvent,
    RolloutEvent,
    Run,
    StepEvent,
    WatchRunResponse,
)
from quartet.v1.rollout_pb2 import FAILURE_KIND_TIMEOUT, PolicySpan, Rollout, RolloutFailure, Sample

STEPS, GROUP = 4, 3


def rollout(step: int, member: int) -> RolloutEvent:
    event = RolloutEvent(
        group=step,
        env_id="reverse-text",
        task_index=step,
        step=step,
        rollout=Rollout(
            member=member,
            reward=0.25 * member,
            samples=[Sample(spans=[PolicySpan(start=0, length=5, policy_version=step - 1)])],
            usage=Usage(prompt_tokens=9, completion_tokens=5),
            replicas=["10.0.0.3:50051"],
            messages=[Message(role="user", content="abc"), Message(role="assistant", content="cba")],
        ),
    )
    if member == 2:
        event.rollout.failure.CopyFrom(RolloutFailure(kind=FAILURE_KIND_TIMEOUT, message="late"))
    return event


def history() -> list[WatchRunResponse]:
    """A whole run: evaluation, steps with their rollouts, evaluation."""
    kinds: list[dict[str, object]] = [
        {"phase": PhaseEvent(run=Run(run_id="r", phase=RUN_PHASE_TRAINING, max_steps=STEPS))},
        {"eval": EvalEvent(step=0, metrics={"eval/reward": 0.4})},
    ]
    for step in range(1, STEPS + 1):
        kinds += [{"rollout": rollout(step, member)} for member in range(GROUP)]
        ledger = Ledger(dispatched=step * GROUP, trained=step * GROUP)
        metrics = {"train/reward": 0.2 * step, "train/loss": 0.01, "rollout/mean_length": 5.0}
        fates = [GroupFate(group=step, members=[1], advantages=[0.5], without_advantage=[0])]
        kinds.append({"step": StepEvent(step=step, metrics=metrics, ledger=ledger, groups=fates)})
    kinds.append({"eval": EvalEvent(step=STEPS, metrics={"eval/reward": 0.9})})
    kinds.append({"phase": PhaseEvent(run=Run(run_id="r", phase=RUN_PHASE_COMPLETED, max_steps=STEPS))})
    return [
        WatchRunResponse(event=number, at_ms=1000 * number, **kind)  # type: ignore[arg-type]
        for number, kind in enumerate(kinds, start=1)
    ]
