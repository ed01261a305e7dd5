"""One member of a group: the question, the turn that answers it, and what became of it.

1. The policy is asked once, with the prompt as the service has it, the request's sampling, and a seed that is
   the member's own.
2. What the prompt says of the chat template wins, key by key, over the request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quartet.v1 import (
    common_pb2,
    envhost_service_pb2,
    inference_service_pb2,
    reward_service_pb2,
    rollout_pb2,
)

from quartet_envhost.sampler import Sampler, Turn, settings_of, turn_seed


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
    turn: Turn | None = None
    reward: reward_service_pb2.CompletionReward | None = None
    model_seconds: float = 0.0
    scoring_seconds: float = 0.0

    @property
    def member(self) -> int:
        """Its number in the group."""
        return self.request.members[0]

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens cut the answer."""
        length = inference_service_pb2.FINISH_REASON_LENGTH
        return self.turn is not None and self.turn.completion.finish_reason == length

    async def ask(self, sampler: Sampler, prompt: reward_service_pb2.RewardPrompt) -> None:
        """Have the policy answer. Raises QuartetError."""
        self.prompt = prompt
        started = time.monotonic()
        try:
            request = generate_request(self.request, prompt)
            generated = await sampler.complete(request, self._conversation, self.answer_by - started)
        finally:
            self.model_seconds = time.monotonic() - started
        self.turn = Turn.of(generated)

    def _conversation(self) -> Sequence[common_pb2.Message]:
        assert self.prompt is not None
        return self.prompt.messages.messages


def generate_request(
    wanted: envhost_service_pb2.RunRolloutsRequest, prompt: reward_service_pb2.RewardPrompt
) -> inference_service_pb2.GenerateRequest:
    """What the policy is asked. Errors: INVALID_REQUEST (variables of the chat template)."""
    request = inference_service_pb2.GenerateRequest(
        run_id=wanted.run_id,
        sampling=wanted.sampling,
        n=1,
        session_id=wanted.request_id,
        template_settings=settings_of(wanted.template_settings, json.loads(prompt.template_settings or "{}")),
    )
    if prompt.HasField("messages"):
        request.messages.CopyFrom(prompt.messages)
    else:
        request.tokens.CopyFrom(prompt.tokens)
    if wanted.sampling.HasField("seed"):
        request.sampling.seed = turn_seed(wanted.sampling.seed, wanted.task_index, wanted.members[0], 0)
    if wanted.HasField("min_policy_version"):
        request.min_policy_version = wanted.min_policy_version
    if wanted.HasField("exact_policy_version"):
        request.exact_policy_version = wanted.exact_policy_version
    if wanted.routed_experts:
        request.experts_from = 0
    return request
