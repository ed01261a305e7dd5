"""What a person is told of an event, in one line."""

from __future__ import annotations

import io

from quartet.cli.display import QUIET_MS, Plain, event_line
from quartet.cli.progress import Progress
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb


def test_why_a_run_stops_is_told_once() -> None:
    phases = (pb.RUN_PHASE_TRAINING, pb.RUN_PHASE_STOPPING, pb.RUN_PHASE_STOPPED)
    lines = []
    for phase in phases:
        run = pb.Run(run_id="r", phase=phase, error="" if phase == pb.RUN_PHASE_TRAINING else "no room")
        lines.append(event_line(pb.WatchRunResponse(phase=pb.PhaseEvent(run=run)), Progress()))
    assert lines == ["run r: training", "run r: stopping", "run r: stopped: no room"]


def test_rollouts_are_counted_where_no_step_ends_for_long() -> None:
    out, progress = io.StringIO(), Progress()
    plain = Plain(out, submitted_at_ms=0)

    def ended(at_ms: int, *, step: int | None = 2, failed: bool = False) -> None:
        rollout = rpb.Rollout(failure=rpb.RolloutFailure(message="no") if failed else None)
        event = pb.WatchRunResponse(at_ms=at_ms, rollout=pb.RolloutEvent(step=step, rollout=rollout))
        plain.event(event, progress)

    progress.add_step(1, {})
    plain.event(pb.WatchRunResponse(at_ms=1000, step=pb.StepEvent(step=1)), progress)
    said = len(out.getvalue())
    ended(1000 + QUIET_MS // 2)
    ended(999 + QUIET_MS, failed=True)
    assert len(out.getvalue()) == said
    ended(1000 + QUIET_MS)
    ended(1001 + QUIET_MS)
    ended(1000 + 2 * QUIET_MS, step=None)
    assert [line[8:].strip() for line in out.getvalue()[said:].splitlines()] == [
        "step 2 goes on: 3 rollouts ended since the last line, 1 failed",
        "the evaluation goes on: 2 rollouts ended since the last line",
    ]
