"""RewardService over the prompts and the functions of a script: what travels, and what is done with it.

1. Rows are read and completions decoded in threads, functions called where functions.py says: the loop that
   answers does neither.
2. After the first failure, of a function or of reading a row, nothing is scored any more: the run is ending,
   and every further ScoreGroup is SCORER_FAILED at once, with the words of the first. `failed` is called with
   it once. Nothing is continued then, either.
3. Where there are no tools, a prompt is answered once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import grpc
import xxhash

from quartet.errors import QuartetError, refused
from quartet.kit.build import SDK, release_of
from quartet.rewards.called import CALLS, FAILED
from quartet.rewards.conversation import Conversation
from quartet.rewards.functions import Failed, RewardFunctions, Scores
from quartet.rewards.prompts import Prompts
from quartet.v1 import envhost_service_pb2, reward_service_pb2, reward_service_pb2_grpc

T = TypeVar("T")

NAME: Final[str] = reward_service_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
#: GetPromptsRequest.count says so.
MAX_PROMPTS: Final = 4096
#: Members of a group (RunRolloutsRequest.members).
MAX_COMPLETIONS: Final = 1024


class RewardServicer(reward_service_pb2_grpc.RewardServiceServicer):
    """The service of one script."""

    def __init__(
        self,
        functions: RewardFunctions,
        train: Prompts,
        evaluation: Prompts | None,
        failed: Callable[[BaseException], None],
        conversation: Conversation | None = None,
    ) -> None:
        self._functions, self._tell, self._conversation = functions, failed, conversation
        self._splits = {envhost_service_pb2.SPLIT_TRAIN: train, envhost_service_pb2.SPLIT_EVAL: evaluation}
        self._failure: Failed | None = None

    async def DescribeRewards(
        self, request: reward_service_pb2.DescribeRewardsRequest, context: grpc.aio.ServicerContext
    ) -> reward_service_pb2.DescribeRewardsResponse:
        """What there is."""
        sizes = {split: 0 if prompts is None else len(prompts) for split, prompts in self._splits.items()}
        return reward_service_pb2.DescribeRewardsResponse(
            train_size=sizes[envhost_service_pb2.SPLIT_TRAIN],
            eval_size=sizes[envhost_service_pb2.SPLIT_EVAL],
            functions=[
                reward_service_pb2.RewardFunction(name=one.name, weight=one.weight)
                for one in self._functions.functions
            ],
            digest=self._digest(),
            version=release_of(SDK),
            max_turns=1 if self._conversation is None else self._conversation.max_turns,
        )

    async def GetPrompts(
        self, request: reward_service_pb2.GetPromptsRequest, context: grpc.aio.ServicerContext
    ) -> reward_service_pb2.GetPromptsResponse:
        """A page of examples. Errors: INVALID_REQUEST."""
        if not 1 <= request.count <= MAX_PROMPTS:
            raise refused("count", request.count, f"ask for 1 to {MAX_PROMPTS} prompts at a time")
        prompts = self._split(request.split)
        if prompts is None:
            return reward_service_pb2.GetPromptsResponse()
        page = await self._read(prompts, lambda: list(prompts.page(request.start, request.count)))
        return reward_service_pb2.GetPromptsResponse(prompts=page)

    async def Continue(
        self, request: reward_service_pb2.ContinueRequest, context: grpc.aio.ServicerContext
    ) -> reward_service_pb2.ContinueResponse:
        """What comes after an answer. Errors: INVALID_REQUEST, RESOURCE_UNKNOWN, SCORER_FAILED."""
        self._example(request.split, request.index)
        if not request.messages or request.messages[-1].role != "assistant":
            remedy = "send those after the prompt, and the answer last"
            raise refused("messages", f"{len(request.messages)} messages", remedy)
        self._refuse_after_failure()
        if self._conversation is None:
            return reward_service_pb2.ContinueResponse()
        outcome = await self._conversation.after(request.messages, request.token_count)
        if isinstance(outcome, Failed):
            raise self._failed(outcome)
        self._refuse_after_failure()
        return outcome

    async def ScoreGroup(
        self, request: reward_service_pb2.ScoreGroupRequest, context: grpc.aio.ServicerContext
    ) -> reward_service_pb2.ScoreGroupResponse:
        """The rewards of a group. Errors: INVALID_REQUEST, RESOURCE_UNKNOWN, SCORER_FAILED."""
        if not 1 <= len(request.completions) <= MAX_COMPLETIONS:
            remedy = f"send 1 to {MAX_COMPLETIONS} completions of one prompt"
            raise refused("completions", len(request.completions), remedy)
        prompts = self._example(request.split, request.index)
        self._refuse_after_failure()
        completion_ids = [one.token_ids for one in request.completions]
        conversations = [list(one.messages) or [one.message] for one in request.completions]
        read = partial(prompts.group, request.index, completion_ids, conversations)
        group = await self._read(prompts, read)
        outcome = await self._functions.score(group)
        if isinstance(outcome, Failed):
            raise self._failed(outcome)
        self._refuse_after_failure()
        if self._conversation is None:
            return _response(outcome, [{}] * len(conversations))
        calls, failures = self._conversation.calls, self._conversation.failures
        return _response(outcome, [{CALLS: calls(one), FAILED: failures(one)} for one in conversations])

    def _example(self, split: envhost_service_pb2.Split, index: int) -> Prompts:
        """The prompts that have it. Errors: INVALID_REQUEST, RESOURCE_UNKNOWN."""
        prompts = self._split(split)
        if prompts is None or index >= len(prompts):
            name = f"{'eval' if split == envhost_service_pb2.SPLIT_EVAL else 'train'}[{index}]"
            raise QuartetError("RESOURCE_UNKNOWN", f"there is no example {name} here", name=name)
        return prompts

    def _split(self, split: envhost_service_pb2.Split) -> Prompts | None:
        """None where there are no examples. Errors: INVALID_REQUEST."""
        if split == envhost_service_pb2.SPLIT_UNSPECIFIED:
            split = envhost_service_pb2.SPLIT_TRAIN
        if split not in self._splits:
            raise refused("split", split, "choose train or eval")
        return self._splits[split]

    async def _read(self, prompts: Prompts, read: Callable[[], T]) -> T:
        """What a thread makes of rows, which are a script's own code where they are no list."""
        try:
            return await asyncio.to_thread(read)
        except Exception as error:  # noqa: BLE001 - of whatever the script gave as rows
            found = Failed(prompts.name, f"{prompts.name} cannot be read: {error!r}", error)
        raise self._failed(found)

    def _failed(self, failure: Failed) -> QuartetError:
        if self._failure is None:
            self._failure = failure
            self._tell(failure.error)
        return _error(self._failure)

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise _error(self._failure)

    def _digest(self) -> str:
        parts = [self._functions.digest, *(one.digest for one in self._splits.values() if one is not None)]
        if self._conversation is not None:
            parts.append(self._conversation.tools.digest)
        return str(xxhash.xxh3_128_hexdigest("\0".join(parts).encode()))


def _error(failure: Failed) -> QuartetError:
    """Not raised from the script's own error: the kit frees the frames of what it answers with, and that
    error is raised again, with its traceback, where the script waits."""
    return QuartetError("SCORER_FAILED", failure.told, function=failure.function)


def _response(
    scores: Scores, measured: Sequence[Mapping[str, float]]
) -> reward_service_pb2.ScoreGroupResponse:
    """`measured`: of each completion, beside what functions logged."""
    return reward_service_pb2.ScoreGroupResponse(
        rewards=[
            reward_service_pb2.CompletionReward(
                scores=[reward_service_pb2.FunctionScore(value=value) for value in values],
                metrics={**metrics, **own},
            )
            for values, metrics, own in zip(
                zip(*scores.values, strict=True), scores.metrics, measured, strict=True
            )
        ]
    )
