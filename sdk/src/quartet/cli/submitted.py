"""A run as it is handed over to an orchestrator that may be of another release.

1. It is sent with its defaults written out, so that it stays what it is where a later release has others.
2. A key that the orchestrator does not know is left out, and told, where the run has the default of it: that
   of a new key is what was done before there was one. One that says something else is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any, Final

import pydantic

from quartet.errors import QuartetError
from quartet.kit.call import RetryBudget, unary
from quartet.kit.standard_streams import say
from quartet.local.toml_text import dumps, inline
from quartet.run.config import RunConfig
from quartet.v1.orchestrator_service_pb2 import SubmitRunRequest, SubmitRunResponse
from quartet.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub

#: The environments are loaded to check the configuration: their hosts say how long that may take.
SUBMIT_SECONDS: Final = 7200.0
#: Keys that are left out, one after the other: more are no earlier release, but another program.
MAX_LEFT_OUT: Final = 32
UNKNOWN_KEY: Final = "unknown key "


async def submitted(
    stub: OrchestratorServiceStub, run_id: str, config: RunConfig, *, but: Collection[str], dry_run: bool
) -> SubmitRunResponse:
    """What the orchestrator answers to a run, of which it gets all but these tables. Raises QuartetError."""
    table = config.model_dump(mode="json", exclude=set(but), exclude_none=True)
    left_out: list[str] = []
    while True:
        request = SubmitRunRequest(run_id=run_id, config_toml=dumps(table), dry_run=dry_run)
        try:
            answer: SubmitRunResponse = await unary(
                stub.SubmitRun, request, timeout_s=SUBMIT_SECONDS, budget=RetryBudget()
            )
        except QuartetError as error:
            unknown = error.metadata.get("key", "") if error.message.startswith(UNKNOWN_KEY) else ""
            if error.reason != "INVALID_CONFIG" or not unknown or len(left_out) == MAX_LEFT_OUT:
                raise
            key = unknown.split(".")
            if not _is_default(config, key) or (value := _taken(table, key)) is None:
                why = f"{error.message}; that is the orchestrator's word, whose release is another than this"
                raise QuartetError(error.reason, why) from error
            left_out.append(f"{unknown} = {inline(value)}")
            continue
        if left_out:
            told = "left out, as the orchestrator is of another release and does not know it"
            say(f"{told}: {', '.join(left_out)}, which is the default here", sys.stderr)
        return answer


def _is_default(config: RunConfig, key: Sequence[str]) -> bool:
    """Whether a run has at a key what it would have if nobody said anything."""
    node, default = config, None
    for part in key:
        if isinstance(node, pydantic.BaseModel) and part in type(node).model_fields:
            field = type(node).model_fields[part]
            node, default = (
                getattr(node, part),
                field.get_default(call_default_factory=True, validated_data={}),
            )
        elif isinstance(node, list | tuple) and part.isdecimal() and int(part) < len(node):
            node, default = node[int(part)], None
        else:
            return False
    return bool(node == default)


def _taken(table: Any, key: Sequence[str]) -> Any:
    """The value at a key, which is there no more; None where it never was."""
    for part in key[:-1]:
        table = table[int(part)] if isinstance(table, list) else table.get(part, {})
    return table.pop(key[-1], None) if isinstance(table, dict) else None
