"""One member of a group: its prompt, the turns of its conversation so far, and what became of it.

1. The policy is asked with the prompt as the service has it, the request's sampling, and a seed that is the
   member's own, another one for each turn. A later turn goes on from the exact tokens of the one before.
2. What the prompt says of the chat template wins, key by key, over the request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from quartet.v1 import (
    common_pb2,
    envhost_service_pb2,
    inference_service_pb2,
    reward_service_pb2,
    rollout_pb2,
)

from quartet_envhost.sampler import Sampler, Turn, ask_for_experts, session_of, settings_of, turn_seed

#: How a conversation ended that no limit cut.
COMPLETED: Final = "completed"


class Failed(Exception):
    """What keeps a member from being rewarded."""

    def __init__(self, failure: rollout_pb2.RolloutFailure) -> None:
        """With its type and its text."""
        super().__init__(failure.message)
        self.failure = failure


@dataclass
class Play:
    """What a member is, as far as it came."""

    request: envhost_service_pb2.RunRolloutsRequest
    #: When it has to be answered, and scored, on the monotonic clock.
    answer_by: float
    score_by: float
    prompt: reward_service_pb2.RewardPrompt | None = None
    turns: list[Turn] = field(default_factory=list)
    #: After the prompt: answers, and what the service said between them.
    said: list[common_pb2.Message] = field(default_factory=list)
    stop_condition: str = COMPLETED
    reward: reward_service_pb2.CompletionReward | None = None
    model_seconds: float = 0.0
    scoring_seconds: float = 0.0

    @property
    def member(self) -> int:
        """Its number in the group."""
        return self.request.members[0]

    @property
    def attempt(self) -> str:
        """By which the service knows a conversation that it opened; empty for others, of which a service of
        an earlier release could not be told."""
        return self.request.request_id if self.prompt is not None and self.prompt.opens else ""

    @property
    def is_cut(self) -> bool:
        """Whether a limit of tokens cut the last answer."""
        length = inference_service_pb2.FINISH_REASON_LENGTH
        return bool(self.turns) and self.turns[-1].completion.finish_reason == length

    @property
    def token_ids(self) -> list[int]:
        """All after the prompt: those of answers, and those between them."""
        if len(self.turns) == 1:
            return self.turns[0].token_ids
        whole = self.turns[-1].prompt_ids + self.turns[-1].token_ids
        return whole[len(self.turns[0].prompt_ids) :]

    async def ask(self, sampler: Sampler, most_tokens: int = 0) -> None:
        """Have the policy answer, with so many tokens at most; 0 for as many as the run says. Raises
        QuartetError."""
        started = time.monotonic()
        try:
            request = generate_request(self, most_tokens)
            generated = await sampler.complete(request, self._conversation, self.answer_by - started)
        finally:
            self.model_seconds += time.monotonic() - started
        self.turns.append(Turn.of(generated, self.turns[-1] if self.turns else None))
        self.said.append(self.turns[-1].completion.message)

    def _conversation(self) -> Sequence[common_pb2.Message]:
        assert self.prompt is not None
        return [*self.prompt.messages.messages, *self.said]

    @property
    def unanswered(self) -> list[common_pb2.Message]:
        """What the service said after the last answer."""
        at = len(self.said)
        while at and self.said[at - 1].role != "assistant":
            at -= 1
        return self.said[at:]


def generate_request(play: Play, most_tokens: int = 0) -> inference_service_pb2.GenerateRequest:
    """What the policy is asked next. Errors: INVALID_REQUEST (variables of the chat template)."""
    wanted, prompt = play.request, play.prompt
    assert prompt is not None
    request = inference_service_pb2.GenerateRequest(
        run_id=wanted.run_id,
        sampling=wanted.sampling,
        n=1,
        session_id=session_of(wanted.request_id),
        template_settings=settings_of(wanted.template_settings, json.loads(prompt.template_settings or "{}")),
        tools=prompt.tools,
    )
    if play.turns:
        request.tokens.token_ids.extend(play.turns[-1].prompt_ids)
        request.tokens.token_ids.extend(play.turns[-1].token_ids)
        request.tokens.tail_messages.extend(play.unanswered)
    elif prompt.HasField("messages"):
        request.messages.CopyFrom(prompt.messages)
    else:
        request.tokens.CopyFrom(prompt.tokens)
    if wanted.sampling.HasField("seed"):
        request.sampling.seed = turn_seed(
            wanted.sampling.seed, wanted.task_index, play.member, len(play.turns)
        )
    if most_tokens:
        asked = wanted.sampling.max_tokens if wanted.sampling.HasField("max_tokens") else most_tokens
        request.sampling.max_tokens = min(most_tokens, asked)
        if request.sampling.min_tokens > request.sampling.max_tokens:
            request.sampling.min_tokens = request.sampling.max_tokens
    if wanted.HasField("min_policy_version"):
        request.min_policy_version = wanted.min_policy_version
    if wanted.HasField("exact_policy_version"):
        request.exact_policy_version = wanted.exact_policy_version
    if wanted.routed_experts:
        ask_for_experts(request, play.turns)
    return request
