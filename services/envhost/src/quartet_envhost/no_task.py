"""The refusal of a task that an environment does not have, for each adapter."""

from __future__ import annotations

from quartet.errors import QuartetError


def no_task(env_id: str, index: int, count: int) -> QuartetError:
    """RESOURCE_UNKNOWN, with how many tasks the split has."""
    some = f"they are 0 to {count - 1}" if count else "there is none"
    return QuartetError(
        "RESOURCE_UNKNOWN", f"{env_id} has no task {index} in this split; {some}", name=f"task {index}"
    )
