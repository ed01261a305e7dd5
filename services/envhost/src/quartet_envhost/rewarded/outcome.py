"""A member of a group as a Rollout of the contract: a result or a typed failure, never both.

1. Its reward is the sum of weight times value over the functions that said one; a function that said nothing
   of it is absent. A number that is not finite is a failure of this member alone.
2. What the functions measured besides is beside the values of functions without weight, which keep their
   names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from quartet import task_data
from quartet.v1 import common_pb2, reward_service_pb2, rollout_pb2

from quartet_envhost import failures
from quartet_envhost.conversation import without_images
from quartet_envhost.rewarded.described import Function, data_of
from quartet_envhost.rewarded.play import COMPLETED, Play
from quartet_envhost.sampler import account
from quartet_envhost.samples import merge_turns


def rollout_of(
    play: Play, functions: Sequence[Function], failure: rollout_pb2.RolloutFailure | None
) -> rollout_pb2.Rollout:
    """The rollout that a play was; `failure` is what ended it before it was rewarded."""
    rollout = rollout_pb2.Rollout(member=play.member)
    rollout.timing.model_ms = round(1000 * play.model_seconds)
    rollout.timing.scoring_ms = round(1000 * play.scoring_seconds)
    if play.turns:
        _record_turns(rollout, play)
    if play.reward is not None:
        failure = _record_reward(rollout, functions, play.reward)
    if play.prompt is not None and play.member < play.request.messages_of_members:
        rollout.messages.extend(_conversation(play, play.prompt))
        rollout.task_json = task_data.told(data_of(play.prompt, "the prompt"))
    if failure is not None:
        rollout.failure.CopyFrom(failure)
    return rollout


def _record_turns(rollout: rollout_pb2.Rollout, play: Play) -> None:
    samples, breaks = merge_turns(play.turns)
    rollout.samples.extend(samples)
    rollout.prefix_breaks = breaks
    rollout.num_turns = len(play.turns)
    rollout.truncated = play.is_cut or play.stop_condition != COMPLETED
    rollout.stop_condition = play.stop_condition
    account(rollout, play.turns)


def _record_reward(
    rollout: rollout_pb2.Rollout, functions: Sequence[Function], said: reward_service_pb2.CompletionReward
) -> rollout_pb2.RolloutFailure | None:
    rollout.metrics.update(said.metrics)
    for function, score in zip(functions, said.scores, strict=True):
        if not score.HasField("value"):
            continue
        into = rollout.rewards if function.weight else rollout.metrics
        into[function.name] = score.value
        if function.weight:
            rollout.reward += function.weight * score.value
    numbers = [*rollout.rewards.items(), *rollout.metrics.items(), ("the reward", rollout.reward)]
    wrong = [name for name, value in numbers if not math.isfinite(value)]
    if not wrong:
        return None
    text = f"not a finite number: {', '.join(wrong)}"
    return failures.failure(failures.SCORER, text, retryable=False)


def _conversation(play: Play, prompt: reward_service_pb2.RewardPrompt) -> list[common_pb2.Message]:
    told = []
    for message in (*prompt.messages.messages, *play.said):
        copy = common_pb2.Message()
        copy.CopyFrom(message)
        told.append(without_images(copy))
    return told
