"""Exit codes of all commands, as docs/commands.md names them."""

from __future__ import annotations

from quartet.v1.orchestrator_service_pb2 import RUN_PHASE_COMPLETED, RUN_PHASE_FAILED, Run, RunPhase

DONE = 0
FAILED = 1
#: A wrong argument or configuration.
REFUSED = 2
#: By Ctrl-C, or a run that was stopped from elsewhere.
INTERRUPTED = 130


def of_run(run: Run) -> int:
    """Of a run that ended; one that stopped by itself says why, and has failed for now."""
    return code_of(run.phase, FAILED if run.error else INTERRUPTED)


def code_of(phase: RunPhase, otherwise: int) -> int:
    """Of a run that ended in this phase; `otherwise` where it can be gone on with."""
    return {RUN_PHASE_COMPLETED: DONE, RUN_PHASE_FAILED: FAILED}.get(phase, otherwise)
