"""RewardService over the prompts and the functions of a script: what travels, and what is done with it.

1. Rows are read and completions decoded in threads, functions called where functions.py says: the loop that
   answers does neither.
2. After the first failure, of a function or of reading a row, nothing is scored any more: the run is ending,
   and every further ScoreGroup is SCORER_FAILED at once, with the words of the first. `failed` is called with
   it once. Nothing is continued then, either.
3. Where there are no tools, a prompt is answered once.
4. Where a script has environments each conversation has one (instances.py), which functions are given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

import grpc
import xxhash

from quartet.errors import QuartetError, refused
from quartet.kit.build import SDK, release_of
from quartet.rewards.called import CALLS, FAILED
from quartet.rewards.conversation import Conversation
from quartet.rewards.environments import Environments, opened
from quartet.rewards.functions import Failed, RewardFunctions, Scores
from quartet.rewards.instances import USUAL, Bounds, Instances
from quartet.rewards.prompts import Prompts
from quartet.v1 import common_pb2, envhost_service_pb2, reward_service_pb2, reward_service_pb2_grpc

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
        environments: Environments | None = None,
        bounds: Bounds = USUAL,
    ) -> None:
        self._functions, self._tell, self._conversation = functions, failed, conversation
        self._environments, self._instances = environments, None
        if environments is not None:
            self._instances = Instances(environments, functions.turns, conversation, bounds)
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

    async def Open(
        self, request: reward_service_pb2.OpenRequest, context: grpc.aio.ServicerContext
    ) -> reward_service_pb2.OpenResponse:
        """What a member alone is told. Errors: INVALID_REQUEST, RESOURCE_UNKNOWN, SCORER_FAILED."""
        prompts = self._example(request.split, request.index)
        self._refuse_after_failure()
        if self._instances is None:
            return reward_service_pb2.OpenResponse()
        row = await self._read(prompts, partial(prompts.row, request.index))
        where = f"{prompts.name}[{request.index}]"
        outcome = await self._instances.open(request.request_id, request.member, row, where)
        if isinstance(outcome, Failed):
            raise self._failed(outcome)
        return reward_service_pb2.OpenResponse(text=outcome)

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
        if self._instances is None:
            outcome = await self._conversation.after(request.messages, request.token_count)
        else:
            asked = request.request_id, request.member, request.messages, request.token_count
            outcome = await self._instances.after(*asked)
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
        score = partial(self._scored, request, prompts)
        if self._instances is None:
            return await score()
        members = [one.member for one in request.completions]
        return await self._instances.scored(request.request_id, members, score)

    async def _scored(
        self, request: reward_service_pb2.ScoreGroupRequest, prompts: Prompts
    ) -> reward_service_pb2.ScoreGroupResponse:
        instances = None
        if self._instances is not None:
            # Before anything is waited for: they may be opened anew meanwhile.
            instances = self._instances.of(request.request_id, [one.member for one in request.completions])
        completion_ids = [one.token_ids for one in request.completions]
        conversations = [list(one.messages) or [one.message] for one in request.completions]
        read = partial(prompts.group, request.index, completion_ids, conversations)
        group = await self._read(prompts, read)
        if instances is not None:
            group = replace(
                group,
                prompts=[
                    opened(*both) for both in zip(group.prompts, (one.said for one in instances), strict=True)
                ],
                environments=[one.made for one in instances],
            )
        outcome = await self._functions.score(group)
        if isinstance(outcome, Failed):
            raise self._failed(outcome)
        self._refuse_after_failure()
        return _response(outcome, [self._measured(one) for one in conversations])

    def _measured(self, messages: Sequence[common_pb2.Message]) -> Mapping[str, float]:
        """Of a conversation with tools."""
        if self._conversation is None:
            return {}
        calls, failures = self._conversation.calls(messages), self._conversation.failures(messages)
        return {CALLS: calls, FAILED: failures}

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
        if self._environments is not None:
            parts.append(self._environments.digest)
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
