"""The members of a group, rewarded together by one ScoreGroup.

1. All of the group are given a reward, or it is Failed: what a function raised and what breaks the contract
   as SCORER, a service that stays away, or has lost conversations, as HOST, which may pass, and time that ran
   out as TIMEOUT.
2. It ends before the worker's own clock does (waited.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from quartet.errors import QuartetError
from quartet.kit.options import MAX_MESSAGE_BYTES
from quartet.v1 import envhost_service_pb2, reward_service_pb2, rollout_pb2

from quartet_envhost import failures
from quartet_envhost.rewarded.asked import PASSING, Asked
from quartet_envhost.rewarded.described import BrokenContract
from quartet_envhost.rewarded.play import Failed, Play
from quartet_envhost.rewarded.waited import EARLIER_S, GONE, failure_of


async def score(
    asked: Asked, functions: int, split: envhost_service_pb2.Split, plays: Sequence[Play]
) -> None:
    """Have the plays rewarded, by so many functions. Raises Failed."""
    request = score_request(split, plays)
    if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
        text = (
            f"the {len(plays)} answers of a group have {size} bytes together, more than a message may have "
            f"({MAX_MESSAGE_BYTES}): sample fewer of a prompt, or shorter ones"
        )
        raise Failed(failures.failure(failures.HOST, text, retryable=False))
    deadline = min(play.score_by for play in plays) - EARLIER_S
    started = time.monotonic()
    try:
        said = await asked.score(request, deadline)
        _check(said, len(plays), functions)
    except BrokenContract as error:
        text = f"RewardService at {asked.address} breaks its contract: {error}"
        raise Failed(failures.failure(failures.SCORER, text, retryable=False)) from error
    except QuartetError as error:
        raise Failed(_failure(error, deadline, plays[0].attempt)) from error
    for play, reward in zip(plays, said.rewards, strict=True):
        play.reward = reward
        play.scoring_seconds = time.monotonic() - started


def score_request(
    split: envhost_service_pb2.Split, plays: Sequence[Play]
) -> reward_service_pb2.ScoreGroupRequest:
    """What is asked of the service."""
    wanted = plays[0].request
    request = reward_service_pb2.ScoreGroupRequest(
        run_id=wanted.run_id, split=split, index=wanted.task_index, request_id=plays[0].attempt
    )
    for play in plays:
        assert play.turns, "only what was answered is scored"
        request.completions.add(
            member=play.member,
            token_ids=play.token_ids,
            message=play.turns[-1].completion.message,
            truncated=play.is_cut,
            messages=play.said if len(play.turns) > 1 else (),
        )
    return request


def _check(said: reward_service_pb2.ScoreGroupResponse, completions: int, functions: int) -> None:
    if len(said.rewards) != completions:
        raise BrokenContract(f"it was asked to score {completions} answers, and scored {len(said.rewards)}")
    wrong = next((len(one.scores) for one in said.rewards if len(one.scores) != functions), None)
    if wrong is not None:
        raise BrokenContract(f"it has {functions} reward functions, and told {wrong} scores of an answer")


def _failure(error: QuartetError, deadline: float, attempt: str) -> rollout_pb2.RolloutFailure:
    if error.reason in PASSING or (attempt and error.reason == GONE):
        return failure_of(error, deadline, "the group is not scored", attempt=attempt)
    # What the service says of a function; and INTERNAL is what any other server makes of what one raises.
    return failures.failure(failures.SCORER, error.message, retryable=False)
