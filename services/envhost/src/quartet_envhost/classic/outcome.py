"""A state of classic Verifiers as a Rollout of the contract: a result or a typed failure, never both.

1. A reward exists only where every reward function answered with a finite number.
2. Only turns that the environment took into its trajectory become samples; what a step masks is not learned.
3. What ended by a clock of the environment's own is a TIMEOUT, although Verifiers scores it.
4. A conversation that no message can tell costs the rollout its messages, and nothing else: what a state has
   for one is whatever its environment put there, which Verifiers itself only writes down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import verifiers as vf
from quartet.v1 import common_pb2, rollout_pb2
from verifiers.utils.message_utils import normalize_messages

from quartet_envhost import failures
from quartet_envhost.classic.policy import PolicyError, RolloutPolicy, wire_message
from quartet_envhost.classic.scoring import absent_of
from quartet_envhost.conversation import without_images
from quartet_envhost.own_code import OwnCode
from quartet_envhost.sampler import RETRYABLE, account
from quartet_envhost.samples import merge_turns


def rollout_of(
    policy: RolloutPolicy,
    raised: Exception | None,
    faults: list[str],
    weights: Mapping[str, float],
    own: OwnCode,
    member: int,
    *,
    with_messages: bool,
) -> rollout_pb2.Rollout:
    """The rollout that a state was; `raised` escaped it, `faults` were noted while it was scored."""
    rollout = rollout_pb2.Rollout(member=member)
    turns = policy.committed()
    samples, rollout.prefix_breaks = merge_turns(turns)
    rollout.samples.extend(samples)
    rollout.num_turns = len(turns)
    account(rollout, policy.turns.values())
    state = policy.state
    if state is not None:
        rollout.stop_condition = state.get("stop_condition") or "completed"
        rollout.truncated = bool(state.get("is_truncated"))
        # By the clock on the wall, which may have been put back meanwhile.
        rollout.timing.scoring_ms = max(0, round(1000 * state["timing"].scoring.duration))
        _record_scores(rollout, state, weights)
        if with_messages and state["trajectory"]:
            rollout.messages.extend(_told(state, own))
    rollout.timing.model_ms = round(policy.model_seconds * 1000)
    found = _failure(rollout, state, raised, faults, own)
    if found is not None:
        rollout.failure.CopyFrom(found)
    return rollout


def _told(state: Any, own: OwnCode) -> list[common_pb2.Message]:
    try:
        return [without_images(wire_message(message)) for message in _conversation(state)]
    except Exception as error:  # noqa: BLE001 - of what the environment left there (4)
        error.add_note("No failure: the rollout is told without its messages.")
        own.text_of(error)  # has it logged, once for each kind
        return []


def _conversation(state: Any) -> list[Any]:
    """Its messages; environments may have put plain dicts or a text in their place."""
    told = state if state.get("completion") else state["trajectory"][-1]
    return [*normalize_messages(told["prompt"]), *normalize_messages(told["completion"])]


def _record_scores(rollout: rollout_pb2.Rollout, state: Any, weights: Mapping[str, float]) -> None:
    rollout.reward = state.get("reward") or 0.0
    for name, value in (state.get("metrics") or {}).items():
        if name not in absent_of(state):
            into = rollout.rewards if weights.get(name) else rollout.metrics
            into[name] = value


def _failure(
    rollout: rollout_pb2.Rollout, state: Any, raised: Exception | None, faults: list[str], own: OwnCode
) -> rollout_pb2.RolloutFailure | None:
    if raised is not None:
        return _of_error(raised, own, scoring=state is not None and state["timing"].scoring.start > 0)
    if state is None:
        text = "the episode ended without a turn of the model"
        return failures.failure(failures.ENVIRONMENT, text, retryable=False)
    if state.get("error") is not None:
        return _of_error(state["error"], own, scoring=False)
    if state.get("timed_out"):
        return failures.failure(failures.TIMEOUT, "the environment's own time limit", retryable=False)
    if faults:
        return failures.failure(failures.SCORER, "; ".join(faults), retryable=False)
    scores = {**rollout.rewards, **rollout.metrics, "the reward": rollout.reward}
    wrong = [name for name, value in scores.items() if not math.isfinite(value)]
    if wrong:
        text = f"not a finite number: {', '.join(wrong)}"
        return failures.failure(failures.SCORER, text, retryable=False)
    return None


def _of_error(error: Any, own: OwnCode, *, scoring: bool) -> rollout_pb2.RolloutFailure:
    if isinstance(error, PolicyError):
        text = f"{type(error).__name__}: {error}"
        return failures.of_policy(error.refusal, text, retryable=error.refusal.reason in RETRYABLE)
    text = own.text_of(error)
    if isinstance(error, vf.ModelError):
        return failures.failure(failures.MODEL, text, retryable=True)
    if isinstance(error, (vf.ToolError, vf.SandboxError)):
        return failures.failure(failures.TOOL, text, retryable=True)
    if isinstance(error, vf.InfraError):
        return failures.failure(failures.HOST, text, retryable=True)
    kind = failures.SCORER if scoring else failures.ENVIRONMENT
    return failures.failure(kind, text, retryable=False)
