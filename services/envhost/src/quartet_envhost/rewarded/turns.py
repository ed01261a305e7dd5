"""The conversation of a member: the policy answers, the service goes on with it, until one of them is done.

1. The service is asked to go on (Continue) after every answer but one that a limit of tokens cut, and the
   last that its conversation may have. A prompt of tokens is answered once.
2. Where what it said fits into no context, the conversation ends before that, with the answer that was the
   last.
3. Whatever keeps a member from its next answer is Failed: of the policy as MODEL, of the service as
   ENVIRONMENT, where it stays away as HOST, and where it does not answer in the member's time as TIMEOUT; a
   conversation that fits into no message is HOST, too. One that the service opened and knows nothing of any
   more is HOST, and may be tried anew.
4. Where the prompt opens, what the service says to this member alone (Open) is appended to its last message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from quartet.errors import QuartetError
from quartet.kit.options import MAX_MESSAGE_BYTES
from quartet.v1 import envhost_service_pb2, reward_service_pb2

from quartet_envhost import failures
from quartet_envhost.rewarded.asked import Asked
from quartet_envhost.rewarded.described import BrokenContract
from quartet_envhost.rewarded.play import Failed, Play
from quartet_envhost.rewarded.waited import EARLIER_S, failure_of
from quartet_envhost.sampler import RETRYABLE, Sampler

#: How a conversation ended that was not the policy's last word, as Verifiers calls it.
MAX_TURNS: Final = "max_turns_reached"
CONTEXT: Final = "prompt_too_long"


async def converse(
    play: Play, sampler: Sampler, asked: Asked, split: envhost_service_pb2.Split, max_turns: int
) -> None:
    """Up to its end. Raises Failed."""
    assert play.prompt is not None
    if play.prompt.opens:
        play.prompt = await _opened(play, play.prompt, asked, split)
    most_tokens, turns = 0, max_turns if play.prompt.HasField("messages") else 1
    while True:
        try:
            await play.ask(sampler, most_tokens)
        except QuartetError as error:
            if error.reason == "PROMPT_TOO_LONG" and play.turns:
                del play.said[len(play.said) - len(play.unanswered) :]
                play.stop_condition = CONTEXT
                return
            raise Failed(
                failures.of_policy(error, str(error), retryable=error.reason in RETRYABLE)
            ) from error
        if play.is_cut:
            return
        if len(play.turns) == turns:
            if play.said[-1].tool_calls:
                play.stop_condition = MAX_TURNS
            return
        more = await _continued(play, asked, split)
        if not more.messages:
            return
        play.said += more.messages
        most_tokens = more.max_tokens


async def _opened(
    play: Play, prompt: reward_service_pb2.RewardPrompt, asked: Asked, split: envhost_service_pb2.Split
) -> reward_service_pb2.RewardPrompt:
    """The prompt of this member."""
    wanted = play.request
    request = reward_service_pb2.OpenRequest(
        run_id=wanted.run_id,
        split=split,
        index=wanted.task_index,
        request_id=play.attempt,
        member=play.member,
    )
    with _failing(play, asked, "the conversation does not begin") as deadline:
        said = await asked.opened(request, deadline)
    own = reward_service_pb2.RewardPrompt()
    own.CopyFrom(prompt)
    own.messages.messages[-1].content += said.text
    return own


async def _continued(
    play: Play, asked: Asked, split: envhost_service_pb2.Split
) -> reward_service_pb2.ContinueResponse:
    wanted = play.request
    request = reward_service_pb2.ContinueRequest(
        run_id=wanted.run_id,
        split=split,
        index=wanted.task_index,
        member=play.member,
        messages=play.said,
        token_count=len(play.token_ids),
        request_id=play.attempt,
    )
    if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
        text = (
            f"a conversation of {len(play.turns)} answers has {size} bytes, more than a message may have "
            f"({MAX_MESSAGE_BYTES}): let the service say less between them, or have fewer turns"
        )
        raise Failed(failures.failure(failures.HOST, text, retryable=False))
    with _failing(play, asked, "the conversation does not go on") as deadline:
        return await asked.continued(request, deadline)


@contextmanager
def _failing(play: Play, asked: Asked, what: str) -> Iterator[float]:
    """The time that a call has; what goes wrong in it, for which `what` does not happen, is Failed."""
    deadline = play.answer_by - EARLIER_S
    try:
        yield deadline
    except BrokenContract as error:
        text = f"RewardService at {asked.address} breaks its contract: {error}"
        raise Failed(failures.failure(failures.ENVIRONMENT, text, retryable=False)) from error
    except QuartetError as error:
        raise Failed(failure_of(error, deadline, what, attempt=play.attempt)) from error
