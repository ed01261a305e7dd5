"""How the packages' tests load a taskset and have an episode scored, without a host and a model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

import verifiers.v1 as vf
from quartet_envhost.v1.tuning import remember_default_factories
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import AgentInfo, ModelCall, Trace, TraceTask
from verifiers.v1.types import AssistantMessage, Response, UserMessage
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

# As in a worker: without it most of an episode's time goes into what pydantic looks up again and again.
remember_default_factories()


def taskset(env_id: str, **arguments: object) -> Any:
    """A taskset as the host loads it."""
    config = taskset_config_type(env_id).model_validate({"id": env_id, **arguments})
    return load_taskset(config)


def scored(
    task: vf.Task,
    replies: str | AssistantMessage | list[str],
    finish: str = "stop",
    *,
    lines: Sequence[str] = (),
    **trace_fields: Any,
) -> Trace:
    """The trace of an episode with this reply or these, scored by its task.

    The user's side is `lines`, or the task's prompt; then it only asks to go on.
    """
    agent = AgentInfo(config=vf.AgentConfig(model="none"))
    trace = Trace(task=TraceTask(type=type(task).__name__, data=task.data), agent=agent, **trace_fields)
    said = replies if isinstance(replies, list) else [replies]
    messages: list[Any] = []
    for reply, line in zip(said, chain(lines or [task.data.prompt], repeat("Go on.")), strict=False):
        messages.append(UserMessage(content=line))
        message = AssistantMessage(content=reply) if isinstance(reply, str) else reply
        response = Response(id="", created=0, model="none", message=message, finish_reason=finish)
        node = prepare_turn(trace, messages).commit(response)
        trace.calls.append(ModelCall(node=node, finish_reason=finish))
        messages.append(message)
    asyncio.run(task.score(trace))
    return trace
