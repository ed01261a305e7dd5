"""Of each rollout of a step in the output folder: whether it was trained on, how, or why not.

1. A line says so from when its step was applied on; until then `trained` is null, and for good where the run
   ended before, the rollout only later, or its orchestrator tells nothing of it. What failed says so from the
   first.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quartet.v1.orchestrator_service_pb2 import GroupFate

Row = dict[str, Any]

#: Why members of a group that was trained on were left out, by the key of the algorithm.
OVERLONG, ZERO_ADVANTAGE = "overlong_filtering", "zero_advantage_filtering"


def unknown(failure: str | None) -> Row:
    """What a line says before its step is applied; of a rollout that failed, by its kind."""
    if failure is None:
        return {"trained": None, "advantage": None, "discarded": None}
    return _left_out(f"failed:{failure}")


def by_group(fates: Iterable[GroupFate]) -> dict[int, GroupFate]:
    """What became of each group of a step."""
    return {fate.group: fate for fate in fates}


def told(row: Row, fates: Mapping[int, GroupFate]) -> Row:
    """The line of a rollout, once its step was applied."""
    fate = fates.get(row["group"])
    if fate is None or row.get("failure"):
        return row
    if fate.discarded:
        return row | _left_out(fate.discarded)
    member = row["member"]
    for advantage, trained in zip(fate.advantages, fate.members, strict=True):
        if trained == member:
            return row | {"trained": True, "advantage": advantage, "discarded": None}
    if member in fate.overlong:
        return row | _left_out(OVERLONG)
    return row | _left_out(ZERO_ADVANTAGE) if member in fate.without_advantage else row


def _left_out(why: str) -> Row:
    return {"trained": False, "advantage": None, "discarded": why}
