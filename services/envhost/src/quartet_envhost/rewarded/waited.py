"""What keeps rollouts from an answer of the service that they waited for.

1. A service that stays away is HOST, which may pass; time that ran out is TIMEOUT, and what else goes wrong
   ENVIRONMENT. A conversation that the service opened, and no longer knows, is HOST: it may be tried anew.
2. A call ends EARLIER_S before the worker's own clock does, so that what is told names the service.
"""

from __future__ import annotations

import time
from typing import Final

from quartet.errors import QuartetError
from quartet.v1 import rollout_pb2

from quartet_envhost import failures
from quartet_envhost.rewarded.asked import PASSING

# How a service says that it knows nothing of a conversation.
GONE: Final = "RESOURCE_UNKNOWN"
# Before the worker's own clock; a busy machine is late by some tenths of a second.
EARLIER_S: Final = 0.5
# Of a call whose time ran out: gRPC counts it by a clock of its own.
NO_TIME_S: Final = 0.05


def failure_of(
    error: QuartetError, deadline: float, what: str, *, attempt: str = ""
) -> rollout_pb2.RolloutFailure:
    """Of a call with that deadline; `what` does not happen for it. `attempt`: of a conversation that was
    opened."""
    text = f"{what}: {error.message}"
    if attempt and error.reason == GONE:
        return failures.failure(failures.HOST, text, retryable=True)
    if error.reason not in PASSING:
        return failures.failure(failures.ENVIRONMENT, text, retryable=False)
    if error.reason == "DEADLINE" and deadline - time.monotonic() < NO_TIME_S:
        return failures.failure(failures.TIMEOUT, text, retryable=False)
    return failures.failure(failures.HOST, text, retryable=True)
