"""What the orchestrator takes a host for that has not told (line.py 3) is what a host is by itself."""

from __future__ import annotations

from quartet_envhost.config import EnvHostConfig
from quartet_orchestrator import line


def test_a_host_that_does_not_tell_is_one_as_nobody_configured_it() -> None:
    fields = EnvHostConfig.model_fields
    assert fields["workers"].default * fields["rollouts_per_worker"].default == line.PLACES
    assert fields["max_in_flight"].default == line.MAX_IN_FLIGHT
