"""A rollout as a line of results.jsonl or failures.jsonl, in the form that Verifiers writes and reads.

Beyond that form a line says which member of its example it is (`rollout`), the key of its task, and which
versions of the policy sampled it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Final

from quartet.cli.messages import message_row
from quartet.cli.outputs import Row, parts_field
from quartet.kit.unknown import enum_name
from quartet.task_data import FIRST
from quartet.v1.common_pb2 import Message
from quartet.v1.rollout_pb2 import FailureKind, Rollout, Task

#: Of a task that has no answer, or no further information; 0 and false are answers.
NOTHING: Final[tuple[object, ...]] = (None, "", [], {})


def result_row(task: Task, rollout: Rollout) -> Row:
    """A result."""
    prompt, completion = conversation(rollout.messages)
    data = json.loads(task.data_json) if task.data_json else {}
    # Verifiers' metrics hold the reward functions too.
    metrics = {**rollout.metrics, **rollout.rewards}
    row: Row = {
        **metrics,
        "example_id": task.index,
        "rollout": rollout.member,
        "task_key": task.key,
        "prompt": prompt,
        "completion": completion,
        "reward": rollout.reward,
        "metrics": metrics,
        "timing": timing(rollout),
        "is_completed": True,
        "is_truncated": rollout.truncated,
        "stop_condition": rollout.stop_condition,
        "num_turns": rollout.num_turns,
        "error": None,
        "token_usage": {
            "input_tokens": float(rollout.usage.prompt_tokens),
            "output_tokens": float(rollout.usage.completion_tokens),
        },
        "policy_versions": sorted(
            {span.policy_version for sample in rollout.samples for span in sample.spans}
        ),
    }
    row |= {name: data[name] for name in FIRST if data.get(name) not in NOTHING}
    return row | parts_field(rollout)


def failure_row(task: Task, rollout: Rollout) -> Row:
    """A failure: it has no reward."""
    kind = failure_kind(rollout)
    text = rollout.failure.message
    prompt, completion = conversation(rollout.messages)
    return {
        "example_id": task.index,
        "rollout": rollout.member,
        "prompt": prompt,
        "completion": completion,
        "is_completed": False,
        "error": {"error": kind, "message": text, "error_chain_repr": text, "error_chain_str": text},
        "retryable": rollout.failure.retryable,
        "time": time.time(),
    }


def failure_kind(rollout: Rollout) -> str:
    """ "TIMEOUT" and so on."""
    return enum_name(FailureKind, rollout.failure.kind)


def conversation(messages: Sequence[Message]) -> tuple[list[Row], list[Row]]:
    """What stood there before the policy first spoke, and everything from then on."""
    rows = [message_row(one) for one in messages]
    first = next((at for at, one in enumerate(rows) if one["role"] == "assistant"), len(rows))
    return rows[:first], rows[first:]


def timing(rollout: Rollout) -> Row:
    """Spans in seconds; their dates are those of the moment at which the result came. Verifiers also has
    "setup", "env" (tools and turns of the environment) and "overhead": of what is neither model nor scoring a
    host tells no parts, and none is made up."""
    spent, end = rollout.timing, time.time()
    start, scoring = end - spent.total_ms / 1000, end - spent.scoring_ms / 1000
    return {
        "start_time": start,
        "generation": {"start": start, "end": scoring, "duration": scoring - start},
        "scoring": {"start": scoring, "end": end, "duration": end - scoring},
        "model": {"spans": [], "duration": spent.model_ms / 1000},
        "total": end - start,
    }
