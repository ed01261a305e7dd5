"""What a person is told of an event, in one line."""

from __future__ import annotations

from quartet.cli.display import event_line
from quartet.cli.progress import Progress
from quartet.v1 import orchestrator_service_pb2 as pb


def test_why_a_run_stops_is_told_once() -> None:
    phases = (pb.RUN_PHASE_TRAINING, pb.RUN_PHASE_STOPPING, pb.RUN_PHASE_STOPPED)
    lines = []
    for phase in phases:
        run = pb.Run(run_id="r", phase=phase, error="" if phase == pb.RUN_PHASE_TRAINING else "no room")
        lines.append(event_line(pb.WatchRunResponse(phase=pb.PhaseEvent(run=run)), Progress()))
    assert lines == ["run r: training", "run r: stopping", "run r: stopped: no room"]
